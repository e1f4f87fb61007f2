import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from goldens import GOLDEN, MANIFEST, MODELS, spec_of
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from tp.kernels import STOCK, Kernels, OneDNNKernels
from tp.memory import Rows, arena_rows, scratch_rows, total_bytes, weight_rows
from tp.model import MoonViT
from tp.parallel import TPGroup
from tp.runner import Runner
from tp.spec import PUBLISHED_K3, Dtype, Grid

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
def test_scratch_bounds_the_measured_peak(  # noqa: PLR0917  (a matrix of cases)
    model: str, dtype: Dtype, world_size: int, grids: list[Grid], kernels: Kernels, tmp_path: Path
) -> None:
    spec = replace(spec_of(model), **WIDE)
    num_patches = sum(grid.num_patches for grid in grids)
    group = LoneRank(rank=0, world_size=world_size, device=torch.device("cpu"))
    measured = peak_bytes(MoonViT(spec, group, kernels=kernels), dtype, grids, tmp_path / "trace.json")
    bound = total_bytes(
        scratch_rows(spec, num_patches=num_patches, world_size=world_size, dtype=dtype, threads=torch.get_num_threads())
    )
    assert measured <= bound
    if num_patches == 4096:
        assert bound < 1.6 * measured


def peak_bytes(model: MoonViT, dtype: Dtype, grids: list[Grid], trace: Path) -> int:
    """What a forward allocates at most, its pixels included, by torch's own count."""
    state = {name: torch.full(p.shape, 0.01, dtype=getattr(torch, dtype)) for name, p in model.named_parameters()}
    model.load_state_dict(state, assign=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        model(torch.zeros(sum(grid.num_patches for grid in grids), model.spec.patch_bytes, dtype=torch.uint8), grids)
    profiled.export_chrome_trace(str(trace))
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    changes = [event["args"] for event in sorted(events, key=lambda event: event["ts"])]
    before: int = changes[0]["Total Allocated"] - changes[0]["Bytes"]
    return max(int(change["Total Allocated"]) for change in changes) - before
