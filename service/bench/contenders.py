"""The ways to run the encoder that `tpvision bench tower` compares: stock torch in one process, and ours.

No process is started here: `service.bench.entrants` does that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tp.bench.messages import KernelSet
from tp.modes import Mode
from tp.settings import Settings
from tp.spec import EncoderSpec, check_world_size

Exchange = Literal["auto", "gloo", "shared_memory"]
Kind = tuple[int, int, KernelSet, Exchange, str]  # what `Contender.kind` tells apart

BASELINE = "stock torch"
_ABLATIONS: dict[str, KernelSet] = {
    "stock linears": "stock-linears",
    "stock attention": "stock-attention",
    "runs of 128": "short-runs",
    "unpacked keys": "unpacked-keys",
}


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to run the encoder. `copies` groups each take an equal part of a batch's images."""

    name: str
    settings: Settings
    mode: Mode = "tp"
    copies: int = 1
    kernels: KernelSet = "fastest"

    @property
    def world_size(self) -> int:
        """Ranks of one group."""
        return self.settings.parallel.tensor

    @property
    def kind(self) -> Kind:
        """The same of both modes of one group."""
        parallel = self.settings.parallel
        return self.world_size, self.copies, self.kernels, parallel.exchange, parallel.cuda_graphs

    @property
    def images_at_once(self) -> int:
        """As many as it takes to keep every rank busy."""
        return self.copies * (self.world_size if self.mode == "dp" else 1)

    def takes(self, patches: Sequence[int]) -> bool:
        """Whether the batch can be shared out: over groups that know nothing of each other, in equal parts only."""
        is_equal = len(patches) % self.copies == 0 and len(set(patches)) == 1
        return len(patches) >= self.images_at_once and (self.copies == 1 or is_equal)


def contenders(
    settings: Settings,
    spec: EncoderSpec,
    world_sizes: Sequence[int],
    exchanges: Sequence[Exchange],
    num_cores: int,
    *,
    has_many_images: bool,
    has_graphs: bool = False,
    ablates: bool = False,
) -> list[Contender]:
    """The ways to compare, the baseline first. Raises SpecError for a world size that the heads do not allow.

    For batches of many images there is data parallelism too, and what it has to reach: as many processes as it has
    ranks, each on its own. `has_graphs`: ranks with CUDA graphs too. `ablates`: one rank with one improvement left out,
    for each of them.
    """
    found = [Contender(BASELINE, _with(settings, 1, num_cores), kernels="stock")]
    for size in world_sizes:
        check_world_size(spec, size)
        threads = num_cores // size
        if size == 1:
            found.append(Contender("1 rank", _with(settings, 1, threads)))
            if has_graphs:
                found.append(Contender("1 rank, graphs", _with(settings, 1, threads, cuda_graphs="on")))
            for what, kernels in _ABLATIONS.items() if ablates else ():
                found.append(Contender(f"1 rank, {what}", _with(settings, 1, threads), kernels=kernels))
            continue
        for exchange in exchanges:
            suffix = "" if exchange == "auto" else f", {exchange}"
            found.append(Contender(f"{size} ranks{suffix}", _with(settings, size, threads, exchange=exchange)))
        if has_graphs:
            found.append(Contender(f"{size} ranks, graphs", _with(settings, size, threads, cuda_graphs="on")))
        if has_many_images:
            full = _with(settings, size, threads, resident="full", exchange=exchanges[0])
            found.append(Contender(f"{size} ranks, data-parallel", full, mode="dp"))
            found.append(Contender(f"{size} processes", _with(settings, 1, threads, groups=size), copies=size))
    return found


def _with(settings: Settings, world_size: int, threads: int, **changes: str | int) -> Settings:
    """For one group of so many ranks, each with so many threads."""
    parallel = {
        "tensor": world_size,
        "groups": 1,
        "workers": "managed",
        "socket": None,
        "threads": max(1, threads),
        "resident": "shard",
        "cuda_graphs": "off",
        **changes,
    }
    return settings.model_copy(update={"parallel": settings.parallel.model_copy(update=parallel)})
