"""The golden tokens from CUDA: one GPU, or two ranks on two GPUs over NCCL where there are two (`pytest -m gpu`)."""

import json
import subprocess
from typing import Any

import pytest
import torch
from running import COMMAND, GOLDEN, REFERENCE_IMAGES, ROOT, RunningService
from safetensors.torch import load, load_file

from tp.rank import pin
from tp.slab import Run, Slab, SlabLayout
from tp.spec import read_spec

pytestmark = pytest.mark.gpu

MANIFEST = json.loads((GOLDEN / "manifest.json").read_text())
MODEL = MANIFEST["models"]["tiny-k3"]


@pytest.mark.parametrize(("world_size", "resident"), [(1, "shard"), (2, "shard"), (2, "full")])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_tokens_are_the_golden_ones(start_service: Any, dtype: str, world_size: int, resident: str) -> None:
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs, found {torch.cuda.device_count()}")
    arguments = ["--model", str(GOLDEN / f"tiny-k3-{dtype}"), "--tp", str(world_size), "--device", "cuda"]
    service: RunningService = start_service(*arguments, TPVISION_PARALLEL__RESIDENT=resident, **REFERENCE_IMAGES)
    expected = load_file(GOLDEN / MODEL["expected"])
    names = [name for name in MODEL["emb_images"] if f"{name}/emb_bf16w_f32" in expected]
    for name in names:
        answer = service.encode((GOLDEN / MANIFEST["images"][name]["file"]).read_bytes())
        tokens = load(answer.content)["embeddings"].float()
        reference = expected[f"{name}/emb_{'f32' if dtype == 'f32' else 'bf16w_f32'}"]
        error = float((tokens - reference).norm() / reference.norm())
        assert error <= (1e-5 if dtype == "f32" else 3e-2), (name, error)
        assert torch.cosine_similarity(tokens, reference, dim=-1).min() >= 0.999


@pytest.mark.parametrize("world_size", [1, 2])
def test_graphed_tiers_give_the_eager_tokens(start_service: Any, world_size: int) -> None:
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs, found {torch.cuda.device_count()}")
    arguments = ["--model", str(GOLDEN / "tiny-k3-bf16"), "--tp", str(world_size), "--device", "cuda"]
    eager, graphed = (
        start_service(*arguments, TPVISION_PARALLEL__CUDA_GRAPHS=switch, **REFERENCE_IMAGES) for switch in ("off", "on")
    )
    ranks = graphed.client.get("/v1/capacity").json()["ranks"]
    assert all(rank["graph_tiers"] == [1024, 4096] for rank in ranks)
    for name in MODEL["emb_images"]:
        content = (GOLDEN / MANIFEST["images"][name]["file"]).read_bytes()
        expected, found = (load(service.encode(content).content)["embeddings"].float() for service in (eager, graphed))
        assert float((found - expected).norm() / expected.norm()) < 3e-2, name


@pytest.mark.slow
def test_the_benchmark_measures_a_gpu() -> None:
    flags = ("--demo", "tiny", "--device", "cuda", "--dtype", "bfloat16", "--tp", "1", "--graphs", "--json")
    batches = ("--patches", "1024", "--images", "4x1024+1x2304", "--rounds", "1", "--seconds", "0.1")
    command = [*COMMAND, "bench", "tower", *flags, *batches]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr
    rows = json.loads(ended.stdout)["rows"]
    assert [row["contender"] for row in rows] == ["stock torch", "1 rank", "1 rank, graphs"] * 2
    assert {row["device"] for row in rows} == {torch.cuda.get_device_name()}
    assert [row["batch"] for row in rows[::3]] == ["1,024", "4 x 1,024 + 1 x 2,304"]
    assert all(0 < row["mfu"] < 1 and row["peak_growth_bytes"] is None for row in rows)
    assert all(row["torch_peak_bytes"] > 0 for row in rows)


def test_the_slab_is_pinned() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    slab = Slab.create(SlabLayout.of(read_spec(GOLDEN / "tiny-k3-bf16"), num_patches=1024, itemsize=2))
    try:
        pin(slab, device)
        assert torch.from_numpy(slab.pixels(Run(256, 64))).is_pinned()
    finally:
        torch.cuda.cudart().cudaHostUnregister(slab.buffer.ctypes.data)
        slab.close()


def test_a_top_tier_that_the_gpu_has_no_room_for_ends_the_start() -> None:
    free_bytes, _ = torch.cuda.mem_get_info()
    ballast = torch.empty(free_bytes - 2 * 2**30, dtype=torch.uint8, device="cuda")
    arguments = ["--model", str(GOLDEN / "tiny-k3-bf16"), "--device", "cuda", "--capacities", "64,4000000"]
    service = RunningService(arguments, {"TPVISION_CAPACITY__SLAB_PATCHES": "4000000"})
    try:
        assert service.process.wait(120) == 1
    finally:
        service.stop()
        del ballast
    assert "the tiers do not fit the memory of the GPU beside the weights" in service.log[-1]
    assert "the largest tier that would fit" in service.log[-1]
