"""What capacity tiers cost in bytes, before anything is started: `tpvision plan` and GET /v1/capacity.

Pure: a spec and settings in, frozen values out; `render` turns them into tables for a terminal, `as_dict` into JSON.
Weights and scratch are counted by `tp.memory`, the slab by `tp.slab`. Beside them stands the reference layout, what
an engine that keeps a buffer per tier on every rank would hold: float32 pixels `[patches, 588]`, two bfloat16 slabs
`[patches, hidden]` and 68 bytes of indices a patch.

Bytes per rank are those of the rank that holds most. The slab is shared by all ranks of the machine and counted once.
"""

import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from service.bounds import largest_chunk, largest_patch_count, largest_picture
from service.memory_check import host_rows
from tp.memory import Device, MemoryRow, arena_rows, scratch_rows, total_bytes, weight_rows
from tp.settings import Settings
from tp.slab import SlabLayout
from tp.spec import ITEMSIZE, Dtype, EncoderSpec, check_world_size

_REFERENCE_INDEX_BYTES = 68  # a patch
_REFERENCE_PIXEL_BYTES = 4  # a value: float32
_REFERENCE_SLAB_BYTES = 2  # a value: bfloat16

PictureSize = tuple[int, int]  # width, height in pixels


@dataclass(frozen=True, slots=True)
class ReferenceBytes:
    """One tier of the reference layout on one rank, or what lies between two tiers."""

    pixels_bytes: int
    slab_bytes: int  # each of the two
    indices_bytes: int

    @property
    def total_bytes(self) -> int:
        """Pixels, both slabs and indices."""
        return self.pixels_bytes + 2 * self.slab_bytes + self.indices_bytes

    @property
    def half_pixels_save_bytes(self) -> int:
        """What pixels of two bytes a value instead of four would save."""
        return self.pixels_bytes // 2

    def __sub__(self, other: "ReferenceBytes") -> "ReferenceBytes":
        return ReferenceBytes(
            self.pixels_bytes - other.pixels_bytes,
            self.slab_bytes - other.slab_bytes,
            self.indices_bytes - other.indices_bytes,
        )


@dataclass(frozen=True, slots=True)
class TierPlan:
    """A capacity, what it admits untouched, and what there is to hold while it is the top one."""

    patches: int
    largest_square: PictureSize
    largest_4_3: PictureSize
    largest_16_9: PictureSize
    never_refuses: bool  # the image rule makes no larger count, so nothing over this tier exists
    larger_than_any_image: bool  # and it even reserves memory that no single image can use
    scratch_bytes: int  # per rank
    slab_bytes: int  # once a machine
    reference: ReferenceBytes  # per rank


@dataclass(frozen=True, slots=True)
class Step:
    """What a tier adds over the next smaller one, and so what dropping it frees."""

    scratch_bytes: int  # per rank
    slab_bytes: int  # once a machine
    reference: ReferenceBytes  # per rank


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """Everything that an operator's choice of tiers, dtype and ranks leads to."""

    model_type: str
    dtype: Dtype
    world_size: int
    groups: int
    legal_world_sizes: tuple[int, ...]
    policy: str
    allow_override: str
    largest_patch_count: int  # that the image rule gives for any picture
    largest_patch_count_size: PictureSize  # the narrowest upright picture that has it
    max_frames: int  # of a video chunk; 1: the tower takes none
    largest_chunk_patches: int | None  # of all its frames together
    tiers: tuple[TierPlan, ...]
    slab_patches: int
    slab_bytes: int  # both arenas and the padding between them
    slab: tuple[MemoryRow, ...]
    host: tuple[MemoryRow, ...]  # all that is touched in the machine's memory
    weights: tuple[MemoryRow, ...]  # per rank
    scratch: tuple[MemoryRow, ...]  # per rank, top tier
    scratch_device: Device  # of that forward

    @property
    def max_patches_per_image(self) -> int:
        """The top tier."""
        return self.tiers[-1].patches

    @property
    def weights_bytes(self) -> int:
        """Per rank."""
        return total_bytes(self.weights)

    @property
    def scratch_bytes(self) -> int:
        """Per rank, for a batch that fills the top tier."""
        return total_bytes(self.scratch)

    @property
    def host_bytes(self) -> int:
        """What a start needs of this machine's memory."""
        return total_bytes(self.host)

    @property
    def steps(self) -> tuple[Step, ...]:
        """What each tier adds over the one below it; the lowest adds all it takes."""
        first = self.tiers[0]
        lowest = Step(first.scratch_bytes, first.slab_bytes, first.reference)
        return (lowest, *(_step(below, tier) for below, tier in itertools.pairwise(self.tiers)))

    @property
    def dropping_top(self) -> Step | None:
        """What dropping the top tier frees; None where it is the only one."""
        return self.steps[-1] if len(self.tiers) > 1 else None

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values: what `tpvision plan --json` prints and GET /v1/capacity answers."""
        drop = self.dropping_top
        return {
            "model_type": self.model_type,
            "dtype": self.dtype,
            "world_size": self.world_size,
            "groups": self.groups,
            "legal_world_sizes": list(self.legal_world_sizes),
            "policy": self.policy,
            "allow_override": self.allow_override,
            "max_patches_per_image": self.max_patches_per_image,
            "largest_image": {
                "patches": self.largest_patch_count,
                "size": list(self.largest_patch_count_size),
            },
            "video_chunk": {"max_frames": self.max_frames, "largest_patches": self.largest_chunk_patches}
            if self.largest_chunk_patches
            else None,
            "tiers": [_tier_dict(tier, step) for tier, step in zip(self.tiers, self.steps, strict=True)],
            "per_rank": {
                "weights_bytes": self.weights_bytes,
                "scratch_bytes": self.scratch_bytes,
                "weights": [asdict(row) for row in self.weights],
                "scratch": [asdict(row) for row in self.scratch],
            },
            "slab": {
                "patches": self.slab_patches,
                "total_bytes": self.slab_bytes,
                "mapped_bytes_per_rank": self.slab_bytes,  # the same pages in every rank
                "arenas": [asdict(row) for row in self.slab],
            },
            "host": {"total_bytes": self.host_bytes, "parts": [asdict(row) for row in self.host]},
            "dropping_top_tier_frees": None if drop is None else _step_dict(drop),
        }


def plan_capacity(
    spec: EncoderSpec, settings: Settings, *, num_cores: int = 1, slab_patches: int | None = None
) -> CapacityPlan:
    """The plan for an encoder under `settings` on a machine of so many cores.

    `slab_patches` is the size of the slab that is there; by default the one that these settings would make. What each
    tier takes of a slab is what a start with it as the top one would.

    Raises SpecError, naming the legal ones, where `parallel.tensor` does not divide the attention heads.
    """
    parallel, capacity = settings.parallel, settings.capacity
    check_world_size(spec, parallel.tensor)
    dtype = settings.compute_dtype(spec)
    scratch = _scratch_of(spec, settings, settings.rank_threads(num_cores))
    slab = _slab_of(spec, settings, slab_patches or settings.slab_patches)
    largest, *size = largest_patch_count(spec.processor)
    return CapacityPlan(
        model_type=spec.model_type,
        dtype=dtype,
        world_size=parallel.tensor,
        groups=parallel.groups,
        legal_world_sizes=spec.legal_world_sizes,
        policy=capacity.policy,
        allow_override=capacity.allow_override,
        largest_patch_count=largest,
        largest_patch_count_size=(size[0], size[1]),
        max_frames=spec.pos_emb_time,
        largest_chunk_patches=largest_chunk(spec),
        tiers=tuple(
            _tier(
                spec,
                patches,
                largest=largest,
                scratch=scratch,
                slab=_slab_of(spec, settings, settings.slab_patches_for(patches)),
            )
            for patches in capacity.patch_capacities
        ),
        slab_patches=slab.num_patches,
        slab_bytes=slab.total_bytes,
        slab=arena_rows(spec, num_patches=slab.num_patches, dtype=dtype),
        host=host_rows(
            spec,
            settings,
            top=capacity.max_patches_per_image,
            slab=slab,
            num_cores=num_cores,
            on_cpu=_device_of(settings) == "cpu",
        ),
        weights=_most(
            [
                weight_rows(spec, world_size=parallel.tensor, dtype=dtype, rank=rank, resident=parallel.resident)
                for rank in range(parallel.tensor)
            ]
        ),
        scratch=scratch(capacity.max_patches_per_image),
        scratch_device=_device_of(settings),
    )


def reference_bytes(spec: EncoderSpec, num_patches: int) -> ReferenceBytes:
    """The reference layout's buffers for a tier of `num_patches`, on one rank."""
    return ReferenceBytes(
        pixels_bytes=num_patches * spec.patch_bytes * _REFERENCE_PIXEL_BYTES,
        slab_bytes=num_patches * spec.hidden_size * _REFERENCE_SLAB_BYTES,
        indices_bytes=num_patches * _REFERENCE_INDEX_BYTES,
    )


def render(plan: CapacityPlan) -> RenderableType:
    """The plan as tables and sentences for a terminal; a plain console prints the same as text."""
    return Group(_tier_table(plan), _memory_table(plan), _reference_table(plan), *sentences(plan))


def _scratch_of(spec: EncoderSpec, settings: Settings, threads: int) -> Callable[[int], tuple[MemoryRow, ...]]:
    """Patches -> scratch of the rank that needs most."""
    device = _device_of(settings)
    dtype = settings.compute_dtype(spec)
    world_size = 1 if settings.parallel.resident == "full" else settings.parallel.tensor  # a rank may encode alone

    def scratch(num_patches: int) -> tuple[MemoryRow, ...]:
        return _most(
            [
                scratch_rows(
                    spec,
                    num_patches=num_patches,
                    world_size=world_size,
                    dtype=dtype,
                    threads=threads,
                    rank=rank,
                    device=device,
                )
                for rank in range(world_size)
            ]
        )

    return scratch


def _device_of(settings: Settings) -> Device:
    """As far as settings tell: `auto` may find a GPU, and is planned for as if it did not."""
    return "cuda" if settings.parallel.device == "cuda" else "cpu"


def _most(ranks: list[tuple[MemoryRow, ...]]) -> tuple[MemoryRow, ...]:
    return max(ranks, key=total_bytes)


def _slab_of(spec: EncoderSpec, settings: Settings, num_patches: int) -> SlabLayout:
    return SlabLayout.of(spec, num_patches=num_patches, itemsize=ITEMSIZE[settings.compute_dtype(spec)])


def _tier(
    spec: EncoderSpec,
    patches: int,
    *,
    largest: int,
    scratch: Callable[[int], tuple[MemoryRow, ...]],
    slab: SlabLayout,
) -> TierPlan:
    return TierPlan(
        patches=patches,
        largest_square=largest_picture(patches, spec.processor),
        largest_4_3=largest_picture(patches, spec.processor, aspect=(4, 3)),
        largest_16_9=largest_picture(patches, spec.processor, aspect=(16, 9)),
        never_refuses=patches >= largest,
        larger_than_any_image=patches > largest,
        scratch_bytes=total_bytes(scratch(patches)),
        slab_bytes=slab.total_bytes,
        reference=reference_bytes(spec, patches),
    )


def _step(below: TierPlan, tier: TierPlan) -> Step:
    return Step(
        scratch_bytes=tier.scratch_bytes - below.scratch_bytes,
        slab_bytes=tier.slab_bytes - below.slab_bytes,
        reference=tier.reference - below.reference,
    )


def _tier_dict(tier: TierPlan, step: Step) -> dict[str, Any]:
    return {
        "patches": tier.patches,
        "largest_square": list(tier.largest_square),
        "largest_4_3": list(tier.largest_4_3),
        "largest_16_9": list(tier.largest_16_9),
        "never_refuses": tier.never_refuses,
        "larger_than_any_image": tier.larger_than_any_image,
        "scratch_bytes": tier.scratch_bytes,
        "slab_bytes": tier.slab_bytes,
        "adds": _step_dict(step),
        "reference": _reference_dict(tier.reference),
        "measured": None,  # a running service knows these two
        "execution": None,
    }


def _step_dict(step: Step) -> dict[str, Any]:
    return {
        "scratch_bytes": step.scratch_bytes,
        "slab_bytes": step.slab_bytes,
        "reference": _reference_dict(step.reference),
    }


def _reference_dict(reference: ReferenceBytes) -> dict[str, int]:
    return {
        **asdict(reference),
        "total_bytes": reference.total_bytes,
        "half_pixels_save_bytes": reference.half_pixels_save_bytes,
    }


def _tier_table(plan: CapacityPlan) -> Table:
    table = _table(
        "Capacity tiers: largest pictures admitted untouched, and bytes that each tier adds",
        "patches",
        "square",
        "4:3",
        "16:9",
        "scratch a rank",
        "slab",
        "reference a rank",
    )
    for tier, step in zip(plan.tiers, plan.steps, strict=True):
        pictures = (tier.largest_square, tier.largest_4_3, tier.largest_16_9)
        added = (step.scratch_bytes, step.slab_bytes, step.reference.total_bytes)
        table.add_row(_count(tier.patches), *map(_size, pictures), *(f"+{_count(value)}" for value in added))
    return table


def _memory_table(plan: CapacityPlan) -> Table:
    ranks = f"{plan.groups} × " if plan.groups > 1 else ""
    table = Table(title=f"Bytes of {plan.model_type} in {plan.dtype} over {ranks}{plan.world_size} rank(s)")
    table.add_column("what")
    table.add_column("formula", overflow="fold")
    table.add_column("bytes", justify="right")
    where = plan.scratch_device.upper()
    parts = (
        ("weights, each rank", plan.weights, plan.weights_bytes),
        (f"scratch of the {where} forward at the top tier, each rank", plan.scratch, plan.scratch_bytes),
        (f"slab of {_count(plan.slab_patches)} patches, once a machine", plan.slab, plan.slab_bytes),
        ("this machine's memory in all", plan.host, plan.host_bytes),
    )
    for name, rows, total in parts:
        for row in rows:
            table.add_row(f"  {row.name}", row.formula, _count(row.num_bytes))
        table.add_row(name, "", _count(total), style="bold", end_section=True)
    return table


def _reference_table(plan: CapacityPlan) -> Table:
    table = _table(
        "Reference layout, bytes a rank: float32 pixels, two bfloat16 slabs, indices",
        "patches",
        "pixels",
        "each slab",
        "indices",
        "total",
        "2-byte pixels save",
    )
    for tier in plan.tiers:
        table.add_row(_count(tier.patches), *_reference_cells(tier.reference))
    if plan.dropping_top is not None:
        table.add_section()
        table.add_row("dropping the top frees", *_reference_cells(plan.dropping_top.reference), style="bold")
    return table


def _reference_cells(reference: ReferenceBytes) -> tuple[str, ...]:
    return tuple(
        _count(value)
        for value in (
            reference.pixels_bytes,
            reference.slab_bytes,
            reference.indices_bytes,
            reference.total_bytes,
            reference.half_pixels_save_bytes,
        )
    )


def sentences(plan: CapacityPlan) -> list[str]:
    """What the numbers mean for the operator, for `tpvision plan` and the start log."""
    width, height = plan.largest_patch_count_size
    top = plan.tiers[-1]
    lines = [
        f"Policy {plan.policy} over {_count(top.patches)} patches, override {plan.allow_override}. The image rule's "
        f"largest count is {_count(plan.largest_patch_count)} patches ({width} x {height}): the top tier "
        + ("is never exceeded." if top.never_refuses else "can be exceeded; one of that size could not."),
        f"World sizes: {', '.join(map(str, plan.legal_world_sizes))}.",
    ]
    lines += [
        f"Tier {_count(tier.patches)} is larger than any image; {_count(plan.largest_patch_count)} is enough."
        for tier in plan.tiers
        if tier.larger_than_any_image
    ]
    if plan.largest_chunk_patches is not None:
        lines.append(
            f"Video chunks have up to {plan.max_frames} frames, which count together: at most "
            f"{_count(plan.largest_chunk_patches)} patches by the model's rule."
        )
    if plan.dropping_top is not None:
        step = plan.dropping_top
        lines.append(
            f"Dropping {_count(top.patches)} frees {_count(step.scratch_bytes)} bytes of scratch on each rank and "
            f"{_count(step.slab_bytes)} bytes of slab; in the reference layout {_count(step.reference.total_bytes)} "
            "bytes on each rank."
        )
    return lines


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _count(value: int) -> str:
    return f"{value:,}"


def _size(size: PictureSize) -> str:
    return f"{size[0]} x {size[1]}"
