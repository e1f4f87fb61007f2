"""What a benchmark and its ranks say to each other: one JSON object a line, over a Unix stream socket a rank.

The rank speaks first, with a `Hello`; each command is answered by every rank that it is sent to. A rank ends when the
socket does. No torch here: both sides import it.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from tp.modes import Mode
from tp.wire import Timing

KernelSet = Literal["fastest", "stock", "stock-linears", "stock-attention", "short-runs", "unpacked-keys"]


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Hello(_Message):
    """A rank that holds its weights and waits for commands. Bytes are those of this rank."""

    rank: int
    pid: int
    device: str  # in words
    threads: int
    weights_bytes: int
    resident_bytes: int  # interpreter, libraries and weights
    attention: str  # the kernel, in words
    collectives: str  # what carries sums, in words


class Forward(_Message):
    """Encode images of these patches, `times` times in a row, up to `in_flight` at once; answered by `Ran`."""

    kind: Literal["forward"] = "forward"
    patches: tuple[int, ...]
    mode: Mode = "tp"
    times: int = Field(1, ge=1)
    in_flight: int = Field(1, ge=1)  # a second one is started before the first is done, as a service under load does
    counts_memory: bool = False  # torch's own count too, which makes it slower


class Ran(_Message):
    """When it began and ended, on the machine's monotonic clock, and what it took at most."""

    started_s: float
    ended_s: float
    peak_bytes: int | None  # RssAnon + RssShmem; None where the kernel does not say, and on a GPU
    torch_peak_bytes: int | None  # tensors beside the weights; None unless asked for


class TimeModes(_Message):
    """Time an image a rank, of each of these patches, in both modes, as a serving rank does; answered by `Timings`."""

    kind: Literal["time_modes"] = "time_modes"
    sizes: tuple[int, ...]


class Timings(_Message):
    """What was timed."""

    timings: tuple[Timing, ...]


class Products(_Message):
    """Run each of a block's four matrix products over so many patches for so long; answered by `Rates`."""

    kind: Literal["products"] = "products"
    patches: int
    seconds: float


class Rates(_Message):
    """FLOP/s of each product, by the fastest way that stock torch has, on all threads of the rank."""

    flops_per_s: dict[str, float]

    @property
    def best(self) -> float:
        """Of the fastest product."""
        return max(self.flops_per_s.values())


Command = Forward | TimeModes | Products
COMMAND: TypeAdapter[Command] = TypeAdapter(Annotated[Command, Field(discriminator="kind")])
