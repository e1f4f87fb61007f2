import contextlib
import math
import re
from dataclasses import replace

import pytest
import torch
from goldens import GOLDEN, MANIFEST, MODELS, spec_of
from torch import Tensor

from tp.bench.allocated import peak_allocated_bytes
from tp.kernels import STOCK, Kernels, OneDNNKernels, choose_kernels
from tp.memory import (
    MemoryFit,
    MemoryShortError,
    Rows,
    arena_rows,
    fit_memory,
    most_scores,
    query_run,
    scratch_rows,
    total_bytes,
    weight_rows,
)
from tp.model import MoonViT
from tp.parallel import TPGroup
from tp.rank import check_device_memory
from tp.runner import Runner
from tp.spec import PUBLISHED_K3, Dtype, Grid

CPU = torch.device("cpu")
WIDE = {"num_layers": 2, "hidden_size": 256, "qkv_size": 384, "mlp_size": 1024, "text_hidden_size": 1792}


class LoneRank(TPGroup):
    """Rank 0 of a larger group, whose collectives allocate what the real ones do and wait for nobody."""

    def all_reduce_(self, x: Tensor) -> Tensor:
        return x

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return x[0].clone()

    def all_gather(self, x: Tensor) -> Tensor:
        return x.new_zeros(self.world_size * x.shape[0], *x.shape[1:])


def test_published_k3_weights() -> None:
    rows = weight_rows(PUBLISHED_K3, world_size=1, dtype="bfloat16")
    assert total_bytes(rows) == 894_717_952


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 12])
def test_weights_are_what_a_rank_holds(model: str, world_size: int) -> None:
    for rank in range(world_size):
        group = TPGroup(rank=rank, world_size=world_size, device=torch.device("cpu"))
        held = sum(parameter.numel() * 4 for parameter in MoonViT(spec_of(model), group).parameters())
        assert total_bytes(weight_rows(spec_of(model), world_size=world_size, dtype="float32", rank=rank)) == held


def test_loaded_runner_agrees() -> None:
    runner = Runner.load(GOLDEN / "tiny-k25-bf16", spec_of("tiny-k25"), dtype="bfloat16", group=TPGroup.single())
    rows = weight_rows(spec_of("tiny-k25"), world_size=1, dtype="bfloat16")
    assert total_bytes(rows) == runner.memory().weights_bytes == 2 * MANIFEST["models"]["tiny-k25"]["n_params_vision"]


def test_arenas_of_the_top_tier() -> None:
    pixels, tokens = arena_rows(PUBLISHED_K3, num_patches=16384, dtype="bfloat16")
    assert (pixels.num_bytes, tokens.num_bytes) == (9_633_792, 58_720_256)
    assert tokens.formula == "4,096 tokens × 14,336 B"


def test_formulas_multiply_to_their_bytes() -> None:
    rows: Rows = weight_rows(PUBLISHED_K3, world_size=3, dtype="bfloat16")
    rows += scratch_rows(PUBLISHED_K3, num_patches=16384, world_size=3, dtype="bfloat16")
    for row in rows:
        counts = [int(count.replace(",", "")) for count in re.findall(r"(?:^|× )([\d,]+)", row.formula)]
        assert math.prod(counts) == row.num_bytes, row


def test_runs_of_queries_shrink_with_patches_and_are_longer_for_several_threads() -> None:
    sizes = (4, 1024, 3072, 4096, 16_384, 32_768, 65_536, 262_144)
    assert [query_run(size, 1) for size in sizes] == [512, 512, 160, 128, 128, 128, 128, 128]
    assert [query_run(size, 2) for size in sizes] == [512, 512, 512, 512, 512, 256, 128, 128]
    assert [query_run(size, 64) for size in sizes] == [query_run(size, 2) for size in sizes]


@pytest.mark.parametrize("threads", [1, 2, 7, 64])
def test_scores_of_every_image_are_planned_for(threads: int) -> None:
    sizes = range(4, 70_000, 4)
    assert {query_run(size, 1) for size in sizes} == set(range(128, 513, 32))
    most = 0
    for size in sizes:
        most = max(most, min(size, query_run(size, threads)) * size)
        assert most <= most_scores(size, threads)
    assert most_scores(65_536, 1) == 128 * 65_536


def test_scratch_grows_with_patches_and_shrinks_with_ranks() -> None:
    def scratch(num_patches: int, world_size: int) -> int:
        return total_bytes(scratch_rows(PUBLISHED_K3, num_patches=num_patches, world_size=world_size, dtype="bfloat16"))

    assert scratch(1024, 1) < scratch(4096, 1) < scratch(16384, 1)
    assert scratch(16384, 4) < scratch(16384, 2) < scratch(16384, 1)


@pytest.mark.parametrize("model", ["tiny-k3", "tiny-k25"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("kernels", "world_size"),
    [(STOCK, 2), (OneDNNKernels(), 1), (OneDNNKernels(), 6)],
    ids=["stock-2", "onednn-1", "onednn-6"],
)
@pytest.mark.parametrize(
    "grids",
    [
        [Grid(1, 2, 2)],
        [Grid(1, 64, 64)],
        [Grid(1, 512, 2), Grid(1, 2, 512)],
        [Grid(1, 32, 32)] * 4,
        [Grid(4, 32, 32)],
        [Grid(4, 2, 2)],
    ],
)
def test_scratch_bounds_the_measured_peak(
    model: str, dtype: Dtype, world_size: int, grids: list[Grid], kernels: Kernels
) -> None:
    spec = replace(spec_of(model), **WIDE)
    num_patches = sum(grid.num_patches for grid in grids)
    group = LoneRank(rank=0, world_size=world_size, device=CPU)
    measured = peak_bytes(MoonViT(spec, group, kernels=kernels), dtype, grids)
    bound = total_bytes(
        scratch_rows(spec, num_patches=num_patches, world_size=world_size, dtype=dtype, threads=torch.get_num_threads())
    )
    assert measured <= bound
    if num_patches == 4096:
        assert bound < 1.6 * measured


def peak_bytes(model: MoonViT, dtype: Dtype, grids: list[Grid], device: torch.device = CPU) -> int:
    """What a forward allocates at most, its pixels included, by torch's own count."""
    kind = {"dtype": getattr(torch, dtype), "device": device}
    model.load_state_dict(
        {name: torch.full(p.shape, 0.01, **kind) for name, p in model.named_parameters()}, assign=True
    )
    shape = (sum(grid.num_patches for grid in grids), model.spec.patch_bytes)

    def forward() -> None:
        model(torch.zeros(shape, dtype=torch.uint8, device=device), grids)

    if device.type == "cuda":
        forward()  # libraries make their workspaces
    return peak_allocated_bytes(forward, device)


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["tiny-k3", "tiny-k25"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("world_size", [1, 2, 6])
@pytest.mark.parametrize("grids", [[Grid(1, 128, 128)], [Grid(1, 64, 64)] * 4, [Grid(4, 64, 64)]])
def test_scratch_bounds_the_measured_peak_on_a_gpu(
    model: str, dtype: Dtype, world_size: int, grids: list[Grid]
) -> None:
    spec, device = replace(spec_of(model), **WIDE), torch.device("cuda")
    kernels = choose_kernels(device, getattr(torch, dtype))
    group = LoneRank(rank=0, world_size=world_size, device=device)
    measured = peak_bytes(MoonViT(spec, group, kernels=kernels), dtype, grids, device)
    rows = scratch_rows(spec, num_patches=16_384, world_size=world_size, dtype=dtype, device="cuda")
    before = sum(row.num_bytes for row in rows if row.name.endswith("of the batch before"))
    assert measured <= total_bytes(rows) - before + 16 * 2**20  # blocks are rounded to as much as a MiB


def test_what_fits_is_found_to_the_token() -> None:
    fit = fit_memory(lambda top: 100 * top, top=64, available_bytes=2_850)
    assert fit == MemoryFit(needed_bytes=6_400, available_bytes=2_850, largest_tier=28)
    assert fit.missing_bytes == 3_550
    with pytest.raises(
        MemoryShortError, match=r"6,400 bytes are needed by it, 2,850 are there, 3,550 are missing; .* 28"
    ):
        fit.check("box", "by it")


@pytest.mark.parametrize(("available_bytes", "largest"), [(399, None), (400, 4), (6_399, 60), (6_400, 64), (9_999, 64)])
def test_the_largest_tier_is_never_over_the_one_that_was_asked_for(available_bytes: int, largest: int | None) -> None:
    fit = fit_memory(lambda top: 100 * top, top=64, available_bytes=available_bytes)
    assert fit.largest_tier == largest
    with contextlib.nullcontext() if largest == 64 else pytest.raises(MemoryShortError):
        fit.check("box", "by it")


def test_a_forward_on_a_gpu_holds_what_the_batch_before_left_and_nothing_that_only_cpus_need() -> None:
    shape = {"num_patches": 16_384, "world_size": 2, "dtype": "bfloat16", "threads": 8}
    on_cpu, on_gpu = (
        {row.name: row.num_bytes for row in scratch_rows(PUBLISHED_K3, **shape, device=device)}  # type: ignore[arg-type]
        for device in ("cpu", "cuda")
    )
    assert on_gpu.keys() - on_cpu.keys() == {"rotated q and k", *(f"{what} of the batch before" for what in BEFORE)}
    assert on_cpu.keys() - on_gpu.keys() == {"attention tiles", "keys and values packed for AMX"}
    assert [on_gpu[f"{what} of the batch before"] for what in BEFORE] == [9_633_792, 58_720_256]


BEFORE = ("pixels", "tokens")


def test_a_gpu_without_room_for_the_top_tier_is_refused_with_the_numbers() -> None:
    scratch = total_bytes(
        scratch_rows(PUBLISHED_K3, num_patches=16_384, rank=1, world_size=2, dtype="bfloat16", device="cuda")
    )
    check_device_memory(PUBLISHED_K3, 16_384, free_bytes=scratch, share=(1, 2), dtype="bfloat16")
    with pytest.raises(MemoryShortError) as caught:
        check_device_memory(PUBLISHED_K3, 16_384, free_bytes=scratch - 1, share=(1, 2), dtype="bfloat16")
    text = str(caught.value)
    assert "the GPU" in text and f"{scratch:,} bytes are needed" in text and "1 are missing" in text
    assert text.endswith("16,380 patches")
