"""What a start needs of this machine's memory, and whether that is there, before anything is started.

Counted is what will be touched, each thing once: the slab, which all ranks of all groups share; the content cache when
full; where ranks compute on CPUs their weights and, for all of them at once, the scratch of a batch that fills the top
tier; and the private memory of idle processes. File pages, such as the checkpoint's or a library's, can be dropped and
are not counted.

A front-end with ranks elsewhere counts its own part and `tpvision worker` that of its group: slab and ranks may be in
different containers. Ranks on GPUs compare for themselves what is on the device (`tp.rank`).
"""

import logging
import os
from pathlib import Path
from typing import Literal

from service.host_memory import ROOT, available, may_have_gpu
from tp.memory import MemoryFit, MemoryRow, Rows, fit_memory, scratch_rows, total_bytes, weight_rows
from tp.settings import Settings
from tp.slab import SlabLayout
from tp.spec import ITEMSIZE, Dtype, EncoderSpec

log = logging.getLogger("tpvision.memory")

Side = Literal["all", "front-end", "workers"]

# Private memory of a process that has done nothing yet, on x86-64 with torch 2.13: 152 MB (a rank, a torchrun) and
# 25 MB (a decode process) were measured. A little less is counted, so that nothing is refused that would fit.
_TORCH_PROCESS_BYTES = 128 * 2**20
_DECODE_PROCESS_BYTES = 20 * 2**20


def host_rows(
    spec: EncoderSpec,
    settings: Settings,
    *,
    top: int,
    slab: SlabLayout | None = None,
    num_cores: int,
    on_cpu: bool,
    side: Side = "all",
) -> Rows:
    """Bytes of this machine's memory while `top` is the top tier; `side` says which part of them is started here.

    `slab` is the one that is there, if it is not the one that a start with `top` would make.
    """
    parallel = settings.parallel
    world_size, dtype = parallel.tensor, settings.compute_dtype(spec)
    groups = 1 if side == "workers" else parallel.groups
    rows: list[MemoryRow] = []
    if side != "workers":
        slab = slab or SlabLayout.of(spec, num_patches=settings.slab_patches_for(top), itemsize=ITEMSIZE[dtype])
        decoders = settings.num_decode_processes(num_cores)
        rows += [
            MemoryRow("slab", f"{slab.num_patches:,} patches", slab.total_bytes),
            _row("decode processes", decoders, _DECODE_PROCESS_BYTES),
        ]
        if cache_bytes := settings.cache.max_bytes:
            rows.append(MemoryRow("content cache", "cache.max_bytes", cache_bytes))
    if side != "front-end":
        rows.append(_row("ranks and their launchers", groups * (world_size + 1), _TORCH_PROCESS_BYTES))
    if side != "front-end" and on_cpu:
        weights = [
            total_bytes(weight_rows(spec, world_size=world_size, dtype=dtype, rank=rank, resident=parallel.resident))
            for rank in range(world_size)
        ]
        scratch = _scratch(spec, world_size, top=top, dtype=dtype, threads=settings.rank_threads(num_cores))
        rows += [_of_ranks("weights", groups, weights), _of_ranks(f"scratch of {top:,} patches", groups, scratch)]
    return tuple(rows)


def fit_host(
    spec: EncoderSpec, settings: Settings, *, available_bytes: int, on_cpu: bool, side: Side = "all"
) -> MemoryFit:
    """Compare what the configured tiers need on this machine with what is available."""
    num_cores = len(os.sched_getaffinity(0))
    return fit_memory(
        lambda top: total_bytes(host_rows(spec, settings, top=top, num_cores=num_cores, on_cpu=on_cpu, side=side)),
        top=settings.capacity.max_patches_per_image,
        available_bytes=available_bytes,
    )


def check_host(spec: EncoderSpec, settings: Settings, *, side: Side = "all", root: Path = ROOT) -> None:
    """Raise MemoryShortError, with the bytes of each part and the largest tier that would fit, unless the tiers fit.

    `root` is where this machine's proc and sys are.
    """
    room, on_cpu = available(root), not may_have_gpu(settings, root)
    fit = fit_host(spec, settings, available_bytes=room.num_bytes, on_cpu=on_cpu, side=side)
    top, num_cores = settings.capacity.max_patches_per_image, len(os.sched_getaffinity(0))
    rows = host_rows(spec, settings, top=top, num_cores=num_cores, on_cpu=on_cpu, side=side)
    parts = ", ".join(f"{row.name} {row.num_bytes:,}" for row in rows)
    slab_patches = settings.capacity.slab_patches
    fixed = "" if slab_patches is None else f" with capacity.slab_patches {slab_patches:,}"
    fit.check(f"memory of this machine ({room.bound})", f"({parts}){fixed}")
    log.info("memory: %d bytes needed (%s), %d there (%s)", fit.needed_bytes, parts, fit.available_bytes, room.bound)


def _scratch(spec: EncoderSpec, world_size: int, *, top: int, dtype: Dtype, threads: int) -> list[int]:
    """Bytes of each rank of a group while it encodes a full batch together.

    Data-parallel, with its images shared out, they take less in all.
    """
    return [
        total_bytes(scratch_rows(spec, num_patches=top, world_size=world_size, dtype=dtype, threads=threads, rank=rank))
        for rank in range(world_size)
    ]


def _row(name: str, count: int, num_bytes: int) -> MemoryRow:
    return MemoryRow(name, f"{count} × {num_bytes:,} B", count * num_bytes)


def _of_ranks(name: str, groups: int, ranks: list[int]) -> MemoryRow:
    each = f"{len(ranks)} × {ranks[0]:,} B" if len(set(ranks)) == 1 else f"({' + '.join(f'{n:,}' for n in ranks)}) B"
    return MemoryRow(name, f"{groups} group(s) × {each}", groups * sum(ranks))
