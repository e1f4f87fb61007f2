"""Control messages between the front-end and the ranks: their fields, their frames, their limits.

One Unix stream socket a rank. The rank speaks first:

    rank                              front-end
    Hello    ->                                     who I am, and the contract I was built for
             <-  Welcome (+ slab descriptor) | Refused
    Progress ->  …                                  weights read so far
    Ready    ->                                     loaded, warm, and what it takes in memory
             <-  Batch                              to every rank of the group
    Done     ->                                     from every rank; rank 0 has written the tokens
    Failed   ->                                     from any rank at any time, then it exits
             <-  Stop                               no more work: exit 0

A frame is a 12-byte header (magic, protocol version, kind, payload length) and a JSON payload that a strict model
checks. Nothing is pickled. Reading and writing sockets is `tp.control`'s and `service.transport`'s job.
"""

import struct
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tp.modes import Mode
from tp.settings import Settings
from tp.slab import Run
from tp.spec import EncoderSpec, Grid

PROTOCOL_VERSION = 4
MAX_PAYLOAD_BYTES = 2**20
MAX_IMAGES_PER_BATCH = 4096

_MAGIC = b"TPV1"
_HEADER = struct.Struct("!4sHHI")
HEADER_BYTES = _HEADER.size


class WireError(ValueError):
    """A frame that is not ours, of another protocol version, too long, or whose payload does not fit its kind."""


class Message(BaseModel):
    """Base of all messages. `kind` is the number in the frame header."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    kind: ClassVar[int]


class Contract(BaseModel):
    """All that both sides must hold alike before a byte is written to the slab."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    protocol: int
    world_size: int
    spec: dict[str, Any]
    dtype: str
    rms_norm_eps: float
    resident: str

    def differences(self, other: "Contract") -> list[str]:
        """One phrase for each field that differs, with both values, ours first."""
        mine, theirs = _flatten(self.model_dump()), _flatten(other.model_dump())
        return [
            f"{key}: {mine.get(key)!r} here, {theirs.get(key)!r} there"
            for key in sorted(mine | theirs)
            if mine.get(key) != theirs.get(key)
        ]


def contract_for(settings: Settings, spec: EncoderSpec, world_size: int) -> Contract:
    """The contract that these settings and this checkpoint make; each side builds its own and they are compared."""
    return Contract(
        protocol=PROTOCOL_VERSION,
        world_size=world_size,
        spec=spec.as_dict(),
        dtype=settings.compute_dtype(spec),
        rms_norm_eps=settings.model.rms_norm_eps,
        resident=settings.parallel.resident,
    )


class Hello(Message):
    """A rank's first words. `incarnation` tells this launch of the group from the one before it."""

    kind = 1
    group: int = Field(ge=0)
    incarnation: str
    rank: int = Field(ge=0)
    pid: int
    contract: Contract
    weights_fingerprint: str


class Welcome(Message):
    """The contract holds; the slab's descriptor travels with this message.

    Slab and tiers are the front-end's, as it was started: it may take up other tiers later, but none above their top.
    """

    kind = 2
    slab_patches: int = Field(gt=0, multiple_of=4)
    slab_bytes: int = Field(gt=0)
    patch_capacities: list[int] = Field(min_length=1)


class Refused(Message):
    """The rank does not fit this front-end. It exits; the reason is for a person."""

    kind = 3
    reason: str


class Progress(Message):
    """Bytes of weights this rank has read, of those it will."""

    kind = 4
    loaded_bytes: int = Field(ge=0)
    total_bytes: int = Field(ge=0)


class Timing(BaseModel):
    """What a batch of images of one size took in this mode, on a rank that is warm."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    mode: Mode
    num_images: int = Field(gt=0)
    num_patches: int = Field(gt=0, description="Of each image.")
    seconds: float = Field(gt=0)


class Ready(Message):
    """Loaded and warm. Bytes as measured on the rank, for the log's comparison with the plan."""

    kind = 5
    device: str
    weights_bytes: int = Field(ge=0)
    slab_bytes: int = Field(gt=0)
    resident_bytes: int = Field(ge=0)
    device_free_bytes: int | None = Field(None, ge=0)  # of a GPU; None on CPU
    attention: str = ""  # the kernel, in words
    graph_tiers: list[int] = []  # tiers that run as CUDA graphs
    timings: list[Timing] = []  # where the group may choose a mode for each batch
    warm_up_patches: int = Field(ge=4)  # of the one image that was encoded after everything was set up
    warm_up_s: float = Field(ge=0)


class BatchImage(BaseModel):
    """Where one image lies in the slab, and its grid."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    start: int = Field(ge=0, multiple_of=4)
    t: int = Field(ge=1)
    h: int = Field(ge=2, multiple_of=2)
    w: int = Field(ge=2, multiple_of=2)

    @property
    def grid(self) -> Grid:
        """The patch grid."""
        return Grid(self.t, self.h, self.w)

    @property
    def run(self) -> Run:
        """Its rows of the slab."""
        return Run(self.start, self.grid.num_patches)


class Batch(Message):
    """Images to encode in one forward."""

    kind = 6
    batch_id: int = Field(ge=0)
    mode: Mode = "tp"
    images: list[BatchImage] = Field(min_length=1, max_length=MAX_IMAGES_PER_BATCH)

    @property
    def num_patches(self) -> int:
        """Rows of the whole batch."""
        return sum(image.grid.num_patches for image in self.images)


class Done(Message):
    """A batch is finished on this rank. `non_finite` lists the images it wrote whose tokens hold NaN or infinity."""

    kind = 7
    batch_id: int
    non_finite: list[int]
    forward_s: float
    all_gather_s: float
    is_graphed: bool = False  # it replayed a CUDA graph


class Failed(Message):
    """The rank's last words before it exits. `is_fatal`: starting it again would end the same way."""

    kind = 8
    reason: str
    is_fatal: bool


class Stop(Message):
    """Finish: no more batches will come."""

    kind = 9


KINDS: dict[int, type[Message]] = {
    message.kind: message for message in (Hello, Welcome, Refused, Progress, Ready, Batch, Done, Failed, Stop)
}


def encode(message: Message) -> bytes:
    """The frame of a message. Raises WireError when it is over the limit."""
    payload = message.model_dump_json().encode()
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise WireError(f"a {type(message).__name__} of {len(payload)} bytes is over the limit of {MAX_PAYLOAD_BYTES}")
    return _HEADER.pack(_MAGIC, PROTOCOL_VERSION, message.kind, len(payload)) + payload


def decode_header(header: bytes) -> tuple[int, int]:
    """(kind, payload bytes) of a frame. Raises WireError before a byte of payload is read."""
    if len(header) != HEADER_BYTES:
        raise WireError(f"a frame header of {len(header)} bytes; it has {HEADER_BYTES}")
    magic, version, kind, length = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise WireError("the peer does not speak tpvision's control protocol")
    if version != PROTOCOL_VERSION:
        raise WireError(f"protocol version {PROTOCOL_VERSION} here, {version} there")
    if kind not in KINDS:
        raise WireError(f"unknown message kind {kind}")
    if length > MAX_PAYLOAD_BYTES:
        raise WireError(f"a payload of {length} bytes is over the limit of {MAX_PAYLOAD_BYTES}")
    return kind, length


def decode_payload(kind: int, payload: bytes) -> Message:
    """The message of a payload. Raises WireError naming the fields that do not fit."""
    if kind not in KINDS:
        raise WireError(f"unknown message kind {kind}")
    try:
        return KINDS[kind].model_validate_json(payload)
    except ValidationError as error:
        fields = ", ".join(
            ".".join(map(str, item["loc"])) or item["type"] for item in error.errors(include_input=False)
        )
        raise WireError(f"a {KINDS[kind].__name__} message does not fit its fields: {fields}") from error


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    return {
        key: leaf
        for name, inner in value.items()
        for key, leaf in _flatten(inner, f"{prefix}.{name}".lstrip(".")).items()
    }
