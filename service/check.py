"""`tpvision check`: whether a checkpoint folder and this machine do what they should, before anybody relies on them.

    spec -> world size -> tensors -> memory plan -> the same picture over one rank and over all -> compare -> memory

The picture goes all the way: decode process, slab, torchrun ranks, and back; only HTTP is left out. Each step is a
`Finding`. One that fails does not end the check where later ones still tell something. It starts worker groups of its
own, so there must be room for them beside whatever else runs. Called by `service.cli`.
"""

import asyncio
import io
import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from service.body import Body
from service.decoders import DecoderStartError
from service.engine import EncodeOptions, Engine
from service.errors import ServiceError
from service.host_memory import available
from service.memory_check import fit_host
from service.plan import CapacityPlan, plan_capacity
from service.record import RequestRecord
from service.reference import Origin, ReferenceFileError, Tokens, distance, read_reference, write_reference
from service.tokens import TokenOptions
from service.version import installed_version
from tp.checkpoint import (
    CheckpointError,
    TensorEntry,
    check_dtype,
    check_tensors,
    count_non_finite,
    fingerprint,
    read_vision_tensors,
)
from tp.memory import MemoryShortError
from tp.settings import Settings, SettingsError
from tp.slab import SlabError
from tp.spec import EncoderSpec, SpecError, check_world_size, model_note, read_spec

Status = Literal["ok", "note", "failed"]

PICTURE_SIZE = (322, 238)  # pixels; 432 patches, 108 tokens
_SHARED_MEMORY = Path("/dev/shm")
_STYLES: dict[Status, str] = {"ok": "green", "note": "yellow", "failed": "bold red"}


class CheckError(RuntimeError):
    """The ranks could not be started, or ended."""


_FAILURES = (
    *(SpecError, SettingsError, CheckpointError, SlabError, DecoderStartError),
    *(CheckError, MemoryShortError, ReferenceFileError, OSError),
)


@dataclass(frozen=True, slots=True)
class Finding:
    """What one step found, in words, and in values for a program."""

    name: str
    status: Status
    text: str
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Checked:
    """Everything found."""

    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        """Whether no step failed."""
        return all(finding.status != "failed" for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values; null for a number that is not finite."""
        values = {"passed": self.passed, "findings": [asdict(finding) for finding in self.findings]}
        return json.loads(json.dumps(values), parse_constant=lambda name: None)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Encoding:
    """The picture's tokens by one world size, and what its ranks said."""

    tokens: Tokens
    seconds: float
    ranks: Sequence[Mapping[str, Any]]

    @property
    def device(self) -> str:
        """Of rank 0, without its number."""
        return str(self.ranks[0]["device"]).partition(":")[0]


async def check_model(
    settings: Settings,
    *,
    reference: Path | None = None,
    against: Path | None = None,
    on_step: Callable[[str], None] = lambda step: None,
) -> Checked:
    """Check the configured checkpoint at the configured world size. Must be awaited on the main thread's loop.

    The embeddings are stored in `reference` and compared with those in `against`. `on_step` hears what begins. Raises
    ReferenceFileError where `against` cannot be read.
    """
    stored = None if against is None else read_reference(against)
    check = _Check(settings, on_step)
    check.inspect()
    await check.encode()
    if reference is not None:
        check.store(reference)
    if stored is not None:
        check.compare_with(*stored)
    check.weigh()
    return Checked(tuple(check.findings))


def render(checked: Checked) -> RenderableType:
    """The findings as a table for a terminal."""
    table = Table(title="tpvision check: " + ("passed" if checked.passed else "failed"))
    table.add_column("step", no_wrap=True)
    table.add_column("result", no_wrap=True)
    table.add_column("found", overflow="fold")
    for finding in checked.findings:
        table.add_row(finding.name, f"[{_STYLES[finding.status]}]{finding.status}[/]", escape(finding.text))
    return table


def check_picture() -> bytes:
    """A PNG with transparency, the same everywhere: colour ramps under noise from integer arithmetic."""
    width, height = PICTURE_SIZE
    y, x = np.mgrid[:height, :width].astype(np.uint32)
    noise = ((x * 73856093 ^ y * 19349663) * 2654435761) >> 26  # wraps around; 6 bits are left
    ramps = (x * 191 // width, y * 191 // height, (x + y) * 191 // (width + height), 192 + x * 0)
    pixels = np.stack([ramp + noise for ramp in ramps], axis=2).astype(np.uint8)
    pixels[: height // 4, : width // 4, 3] = 0
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


class _Check:
    """The steps, in the order of their calls, and what they leave for later ones."""

    def __init__(self, settings: Settings, on_step: Callable[[str], None]) -> None:
        self.findings: list[Finding] = []
        self._settings = settings
        self._on_step = on_step
        self._spec: EncoderSpec | None = None
        self._plan: CapacityPlan | None = None
        self._fingerprint: str | None = None
        self._room = available()  # before anything is started
        self._encodings: dict[int, Encoding] = {}

    @property
    def _world_size(self) -> int:
        return self._settings.parallel.tensor

    def inspect(self) -> None:
        """What the folder and the settings tell without starting anything."""
        self._on_step("reading the checkpoint")
        with self._step("spec"):
            self._read_spec()
        if self._spec is None:
            return
        with self._step("world size"):
            self._check_world_size(self._spec)
        with self._step("tensors"):
            self._check_tensors(self._spec)
        if self._world_size in self._spec.legal_world_sizes:  # else that is said already
            with self._step("memory plan"):
                self._plan_memory(self._spec)

    async def encode(self) -> None:
        """The picture over one rank, and over as many as configured; then compared."""
        if self._spec is None or self._fingerprint is None or self._plan is None:
            return
        for world_size in sorted({1, self._world_size}):
            self._on_step(f"encoding a picture over {world_size} rank(s)")
            with self._step(f"encode over {world_size}"):
                self._encodings[world_size] = await _encode(self._settings_for(world_size), self._spec)
                self._judge_encoding(world_size, self._encodings[world_size])
        if {1, self._world_size} == self._encodings.keys() and self._world_size > 1:
            found, one = self._encodings[self._world_size].tokens, self._encodings[1].tokens
            self._judge_distance(f"{self._world_size} ranks = 1 rank", found, one, self._plan.dtype)

    def store(self, path: Path) -> None:
        """Write the embeddings of the configured world size."""
        with self._step("reference"):
            if (result := self._result()) is None:
                raise CheckError("there are no embeddings to write")
            write_reference(path, *result)
            self._add("reference", "ok", f"written to {path}", asdict(result[1]))

    def compare_with(self, tokens: Tokens, origin: Origin) -> None:
        """Compare the embeddings of the configured world size with those of another installation."""
        name = "against"
        if (result := self._result()) is None:
            self._add(name, "failed", "there are no embeddings to compare")
        elif origin.fingerprint != result[1].fingerprint:
            text = f"other weights: fingerprint {result[1].fingerprint[:16]} here, {origin.fingerprint[:16]} there"
            self._add(name, "failed", text, {"here": asdict(result[1]), "there": asdict(origin)})
        elif tokens.shape != result[0].shape:
            text = f"embeddings of shape {list(result[0].shape)} here, {list(tokens.shape)} there"
            self._add(name, "failed", text, {"there": asdict(origin)})
        else:
            there = f"tpvision {origin.version}, {origin.dtype}, {origin.world_size} rank(s) on {origin.device}"
            self._judge_distance(name, result[0], tokens, result[1].dtype, origin.dtype, suffix=f"; there: {there}")

    def weigh(self) -> None:
        """Memory of the machine and of its GPUs, and which attention runs."""
        encoding = self._encodings.get(self._world_size)
        if self._plan is not None:
            self._judge_memory(self._plan, encoding)
        free = shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else 0
        use = "NCCL uses it between GPUs; tpvision itself does not"
        self._add("/dev/shm", "ok", f"{free:,} bytes free ({use})", {"free_bytes": free})
        if encoding is not None:
            kernels = sorted({str(rank["attention"]) for rank in encoding.ranks})
            lean = encoding.device == "cpu" or all(kernel.startswith("flash") for kernel in kernels)
            text = f"{'; '.join(kernels)} ({encoding.device})"
            self._add("attention", "ok" if lean else "note", text, {"kernels": kernels, "device": encoding.device})

    def _read_spec(self) -> None:
        path = self._settings.model.path
        assert path is not None, "the command names a folder"
        spec = read_spec(path)
        self._spec = spec
        note = model_note(spec)
        text = (
            f"{spec.family} (model_type {spec.model_type!r}): {spec.num_layers} layers, {spec.num_heads} heads, "
            f"{spec.hidden_size} wide, tokens {spec.text_hidden_size} wide, "
            + (f"video chunks of up to {spec.pos_emb_time} frames" if spec.takes_video else "no video")
        )
        values = {"family": spec.family, **spec.as_dict()}
        self._add("spec", "note" if note else "ok", f"{text}. {note}" if note else text, values)

    def _check_world_size(self, spec: EncoderSpec) -> None:
        check_world_size(spec, self._world_size)
        legal = list(spec.legal_world_sizes)
        text = f"{self._world_size}, of {', '.join(map(str, legal))}"
        self._add("world size", "ok", text, {"world_size": self._world_size, "legal": legal})

    def _check_tensors(self, spec: EncoderSpec) -> None:
        assert self._settings.model.path is not None
        table = read_vision_tensors(self._settings.model.path, spec)
        check_tensors(spec, table)
        check_dtype(spec, table, self._settings.model.dtype)
        num_bytes = sum(entry.stop - entry.start for entry in table.values())
        dtypes = sorted({entry.dtype for entry in table.values()})
        self._fingerprint = fingerprint(table)
        text = f"{len(table)} of {', '.join(dtypes)}, {num_bytes:,} bytes, fingerprint {self._fingerprint[:16]}"
        values = {"count": len(table), "bytes": num_bytes, "dtypes": dtypes, "fingerprint": self._fingerprint}
        self._add("tensors", "ok", text, values)
        self._scan(table.values())

    def _scan(self, entries: Iterable[TensorEntry]) -> None:
        self._on_step("reading the weights")
        counts = {entry.name: count_non_finite(entry) for entry in entries}
        broken = {name: count for name, count in counts.items() if count}
        name, count = next(iter(broken.items()), ("", 0))
        text = f"NaN or infinite values in {len(broken)} tensor(s), such as {name} with {count:,}"
        self._add("weights", "failed" if broken else "ok", text if broken else "all finite", {"non_finite": broken})

    def _plan_memory(self, spec: EncoderSpec) -> None:
        plan = plan_capacity(spec, self._settings)
        self._plan = plan
        text = (
            f"in {plan.dtype}, each rank {plan.weights_bytes:,} bytes of weights and up to {plan.scratch_bytes:,} of "
            f"scratch (top tier {plan.max_patches_per_image:,} patches); slab {plan.slab_bytes:,}"
        )
        self._add("memory plan", "ok", text, plan.as_dict())

    def _settings_for(self, world_size: int) -> Settings:
        """Ranks of our own, which may be lost no second time."""
        changes = {"tensor": world_size, "groups": 1, "workers": "managed", "socket": None, "max_restarts": 0}
        return self._settings.model_copy(
            update={
                "parallel": self._settings.parallel.model_copy(update=changes),
                "cache": self._settings.cache.model_copy(update={"max_bytes": 0}),  # it would be what is timed
            }
        )

    def _judge_encoding(self, world_size: int, encoding: Encoding) -> None:
        name = f"encode over {world_size}"
        is_finite = bool(np.isfinite(encoding.tokens).all())
        text = f"{len(encoding.tokens)} tokens in {encoding.seconds * 1000:.0f} ms on {encoding.device}, "
        values = {"shape": list(encoding.tokens.shape), "seconds": encoding.seconds, "ranks": list(encoding.ranks)}
        said = "all finite" if is_finite else "some of them NaN or infinite"
        self._add(name, "ok" if is_finite else "failed", text + said, {**values, "is_finite": is_finite})

    def _judge_distance(self, name: str, found: Tokens, expected: Tokens, *dtypes: Any, suffix: str = "") -> None:
        far = distance(found, expected, *dtypes)
        text = f"relative difference {far.relative:.2g}, at most {far.tolerance:g} allowed; largest {far.max_abs:.2g}"
        self._add(name, "ok" if far.is_within else "failed", text + suffix, asdict(far))

    def _judge_memory(self, plan: CapacityPlan, encoding: Encoding | None) -> None:
        assert self._spec is not None, "it was planned"
        on_cpu = self._settings.parallel.device == "cpu" or (encoding is not None and encoding.device == "cpu")
        fit = fit_host(self._spec, self._settings, available_bytes=self._room.num_bytes, on_cpu=on_cpu)
        text = f"{fit.available_bytes:,} bytes available ({self._room.bound}), {fit.needed_bytes:,} needed"
        values = {"available_bytes": fit.available_bytes, "planned_bytes": fit.needed_bytes}
        self._add("memory", "failed" if fit.missing_bytes else "ok", text, values)
        for rank in encoding.ranks if encoding is not None else ():
            free = rank["device_free_bytes"]
            if free is not None:  # weights are in it already
                status: Status = "ok" if free >= plan.scratch_bytes else "note"
                text = f"{free:,} bytes free beside the weights, up to {plan.scratch_bytes:,} of scratch planned"
                self._add(f"memory of {rank['device']}", status, text, {"free_bytes": free})

    def _result(self) -> tuple[Tokens, Origin] | None:
        encoding = self._encodings.get(self._world_size)
        if encoding is None or self._spec is None or self._plan is None or self._fingerprint is None:
            return None
        origin = Origin(
            model_type=self._spec.model_type,
            fingerprint=self._fingerprint,
            dtype=self._plan.dtype,
            version=installed_version(),
            device=encoding.device,
            world_size=str(self._world_size),
        )
        return encoding.tokens, origin

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        """A step that adds its own finding, or the error that ended it."""
        try:
            yield
        except _FAILURES as error:
            self._add(name, "failed", str(error))
        except ServiceError as error:
            self._add(name, "failed", error.message, {"code": error.code})

    def _add(self, name: str, status: Status, text: str, values: Mapping[str, Any] | None = None) -> None:
        self.findings.append(Finding(name, status, text, values or {}))


async def _encode(settings: Settings, spec: EncoderSpec) -> Encoding:
    """The test picture's tokens by a worker group that is started for it and stopped again."""
    engine = Engine(settings, spec)
    await engine.start()
    try:
        ready = asyncio.ensure_future(engine.ready.wait())
        await asyncio.wait((ready, engine.failure), return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if engine.failure.done():
            raise CheckError(str(engine.failure.result()))
        with Body() as body:
            body.write(check_picture())
            options = EncodeOptions(settings, policy="downscale", tokens=TokenOptions("float32"))
            await engine.encode([body.image], options, RequestRecord())  # the first one of a size is slower
            started = time.monotonic()
            encoded = await engine.encode([body.image], options, RequestRecord())
            seconds = time.monotonic() - started
        return Encoding(encoded.embeddings.values, seconds, engine.describe_capacity()["ranks"])
    finally:
        await engine.stop()
