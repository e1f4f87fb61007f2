import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np
import pytest
import torch
from goldens import DTYPES, EPS, GOLDEN, MANIFEST, MODELS, Distance, encode, expected_of, image_item, run, spec_of
from safetensors.torch import load_file
from torch import Tensor

from tp.checkpoint import fingerprint, read_vision_tensors
from tp.memory import total_bytes, weight_rows
from tp.model import RMS_NORM_EPS
from tp.parallel import TPGroup
from tp.runner import BatchError, Runner, _is_finite
from tp.spec import Dtype, Grid

ROOT = Path(__file__).parents[2]
LAUNCH_TIMEOUT_S = 120
RESIDENT: tuple[Literal["shard", "full"], ...] = ("shard", "full")
WORLD_SIZES = {"tiny-k3": (1, 2, 3, 4, 6), "tiny-k25": (1, 2, 4), "tiny-kimivl": (1, 2, 4)}
WARM_UP = """
import sys
from pathlib import Path
from tp.parallel import TPGroup
from tp.runner import Runner
from tp.spec import read_spec

folder = Path(sys.argv[1])
Runner.load(folder, read_spec(folder), dtype="float32", group=TPGroup.single()).warm_up(16)
print("sympy" in sys.modules)
"""
PARITY = [
    (world_size, model, precision) for model in MODELS for world_size in WORLD_SIZES[model] for precision in DTYPES
]


@cache
def results(world_size: int) -> dict[str, Tensor]:
    """`model/precision/case` -> tokens, from one torchrun group, or from this process for one rank."""
    models = [model for model in MODELS if world_size in WORLD_SIZES[model]]
    if world_size == 1:
        group = TPGroup.single()
        runs = {f"{model}/{precision}": run(model, precision, group) for model in models for precision in DTYPES}
        return {f"{prefix}/{name}": tokens for prefix, found in runs.items() for name, tokens in found.items()}
    with TemporaryDirectory() as folder:
        out = Path(folder) / "results.safetensors"
        launch = [sys.executable, "-W", "error", "-m", "torch.distributed.run", "--standalone"]
        script = [str(ROOT / "tests" / "tp" / "rank_goldens.py"), str(out), *models]
        environ = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        subprocess.run(
            [*launch, "--nproc-per-node", str(world_size), *script],
            env={**os.environ, **environ},
            timeout=LAUNCH_TIMEOUT_S,
            check=True,
        )
        return load_file(out)


@cache
def float32_of_bf16_weights(model: str) -> dict[str, Tensor]:
    """The yardstick of bf16 error, where the goldens store none."""
    return run(model, "bf16", TPGroup.single(), dtype="float32")


def yardstick(model: str, precision: str, name: str) -> Tensor:
    stored = expected_of(model)
    if precision == "f32":
        return stored[name.replace("/emb", "/emb_f32")]
    key = name.replace("/emb", "/emb_bf16w_f32")
    return stored[key] if key in stored else float32_of_bf16_weights(model)[name]


def distances(world_size: int, model: str, precision: str) -> dict[str, Distance]:
    prefix = f"{model}/{precision}/"
    found = {key.removeprefix(prefix): tokens for key, tokens in results(world_size).items() if key.startswith(prefix)}
    return {name: Distance.of(tokens, yardstick(model, precision, name)) for name, tokens in found.items()}


@pytest.fixture
def runner() -> Runner:
    return load("tiny-k3")


def load(model: str, precision: str = "f32", dtype: Dtype | None = None, device: str = "cpu") -> Runner:
    group = TPGroup.single(device)
    return Runner.load(GOLDEN / f"{model}-{precision}", spec_of(model), dtype=dtype or DTYPES[precision], group=group)


@pytest.mark.parametrize(("world_size", "model", "precision"), PARITY)
def test_tokens_match_the_goldens(world_size: int, model: str, precision: str) -> None:
    found = distances(world_size, model, precision)
    passes = {name: d.passes_f32 if precision == "f32" else d.passes_bf16 for name, d in found.items()}
    assert [(name, found[name]) for name, passed in passes.items() if not passed] == []
    assert len(found) >= 17


@pytest.mark.parametrize("model", MODELS)
def test_float32_arithmetic_on_bf16_weights_matches_the_goldens(model: str) -> None:
    found, stored = float32_of_bf16_weights(model), expected_of(model)
    keys = {name: name.replace("/emb", "/emb_bf16w_f32") for name in found}
    far = [name for name, key in keys.items() if key in stored and not Distance.of(found[name], stored[key]).passes_f32]
    assert far == []


def test_another_epsilon_fails_the_gate() -> None:
    found = results(1)["tiny-k3/f32/rgba_120x90/emb_eps1em5"]
    assert not Distance.of(found, expected_of("tiny-k3")["rgba_120x90/emb_f32"]).passes_f32
    assert EPS[""] == RMS_NORM_EPS == 2**-23


@pytest.mark.parametrize(("world_size", "model"), [(1, "tiny-k3"), (4, "tiny-k3"), (2, "tiny-k25"), (2, "tiny-kimivl")])
def test_an_image_alone_equals_the_same_image_packed(world_size: int, model: str) -> None:
    found = results(world_size)
    images = MANIFEST["models"][model]["batch_images"]
    alone = torch.cat([found[f"{model}/f32/{image}/emb"] for image in images])
    assert Distance.of(found[f"{model}/f32/batch/emb"], alone).passes_f32


def test_casting_a_float32_checkpoint_equals_the_bf16_one() -> None:
    grid, pixels = image_item("rgba_120x90")
    cast = encode(load("tiny-k3", "f32", "bfloat16"), [grid], [pixels])
    assert torch.equal(cast[0], encode(load("tiny-k3", "bf16"), [grid], [pixels])[0])


def test_float16_is_as_close_as_bfloat16() -> None:
    grid, pixels = image_item("rgba_120x90")
    tokens = encode(load("tiny-k3", "f32", "float16"), [grid], [pixels])[0]
    assert Distance.of(tokens, expected_of("tiny-k3")["rgba_120x90/emb_f32"]).passes_bf16


def test_report_times_both_parts(runner: Runner) -> None:
    grid, pixels = image_item("one_1x1")
    report = runner.encode([grid], [pixels])
    assert report.forward_s > 0
    assert report.all_gather_s >= 0
    assert report.non_finite == ()


def test_read_only_pixels_are_fine(runner: Runner) -> None:
    grid, pixels = image_item("one_1x1")
    pixels.flags.writeable = False
    assert len(encode(runner, [grid], [pixels])) == 1


def test_report_names_the_non_finite_image(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    def poison(share: Tensor, _: object) -> Tensor:
        share[2, 5] = torch.nan
        return share

    monkeypatch.setattr(runner._model, "gather", poison)
    items = [image_item(image) for image in ("one_1x1", "odd_27x29", "one_1x1")]
    outputs = [np.empty((grid.num_tokens, 128 * 4), np.uint8) for grid, _ in items]
    report = runner.encode([grid for grid, _ in items], [pixels for _, pixels in items], outputs)
    assert report.non_finite == (1,)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_non_finite_values_are_seen(value: float, dtype: torch.dtype) -> None:
    x = torch.ones(3, 5, dtype=dtype)
    assert _is_finite(x)
    x[1, 2] = value
    assert not _is_finite(x)


@pytest.mark.parametrize(
    ("grid", "shape", "message"),
    [
        (Grid(1, 2, 2), (8, 588), r"pixels of image 0 must be .*\(4, 588\)"),
        (Grid(1, 2, 2), (4, 587), r"pixels of image 0 must be .*\(4, 588\)"),
        (Grid(1, 3, 2), (6, 588), "image 0: .* even sides"),
        (Grid(1, 0, 2), (0, 588), "image 0: .* even sides"),
        (Grid(5, 2, 2), (20, 588), "image 0: .* 1 to 4 frames"),
    ],
)
def test_misfit_is_refused(runner: Runner, grid: Grid, shape: tuple[int, int], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        runner.encode([grid], [np.zeros(shape, np.uint8)])


def test_output_of_the_wrong_size_is_refused(runner: Runner) -> None:
    grid, pixels = image_item("odd_27x29")
    with pytest.raises(BatchError, match=r"output of image 0 must be .*\(2, 512\)"):
        runner.encode([grid], [pixels], [np.empty((2, 256), np.uint8)])


@pytest.mark.parametrize(("num_grids", "num_pixels", "num_outputs"), [(0, 0, 0), (1, 2, 1), (1, 1, 0)])
def test_counts_must_agree(runner: Runner, num_grids: int, num_pixels: int, num_outputs: int) -> None:
    grid, pixels = image_item("one_1x1")
    with pytest.raises(BatchError, match="grids need as many"):
        runner.encode([grid] * num_grids, [pixels] * num_pixels, [np.empty((1, 512), np.uint8)] * num_outputs)


@pytest.mark.parametrize("num_patches", [4, 28, 1024])
def test_warm_up_takes_any_multiple_of_four(runner: Runner, num_patches: int) -> None:
    assert runner.warm_up(num_patches).forward_s > 0


def test_memory_is_what_the_parameters_take(runner: Runner) -> None:
    assert runner.memory().weights_bytes == 4 * MANIFEST["models"]["tiny-k3"]["n_params_vision"]
    assert runner.memory().peak_allocated_bytes is None


def test_fingerprint_is_the_checkpoints(runner: Runner) -> None:
    assert runner.fingerprint == fingerprint(read_vision_tensors(GOLDEN / "tiny-k3-f32", runner.spec))


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("precision", DTYPES)
def test_cuda_matches_the_goldens(model: str, precision: str) -> None:
    for name, tokens in run(model, precision, TPGroup.single("cuda")).items():
        distance = Distance.of(tokens, yardstick(model, precision, name))
        assert distance.passes_f32 if precision == "f32" else distance.passes_bf16, (name, distance)


@pytest.mark.gpu
def test_cuda_reports_its_peak() -> None:
    runner = load("tiny-k3", device="cuda")
    runner.warm_up(1024)
    peak = runner.memory().peak_allocated_bytes
    assert peak is not None
    assert peak > runner.memory().weights_bytes


@pytest.mark.parametrize(("model", "rank", "world_size"), [("tiny-k3", 1, 2), ("tiny-k25", 3, 4)])
def test_shards_cut_from_all_weights_are_those_read_from_the_file(model: str, rank: int, world_size: int) -> None:
    group = TPGroup(rank=rank, world_size=world_size, device=torch.device("cpu"))
    read, cut = (
        Runner.load(GOLDEN / f"{model}-bf16", spec_of(model), dtype="bfloat16", group=group, resident=resident)
        for resident in RESIDENT
    )
    expected = dict(read._model.named_parameters())
    assert {name for name, _ in cut._model.named_parameters()} == set(expected)
    for name, parameter in cut._model.named_parameters():
        assert torch.equal(parameter, expected[name]), name
        assert parameter.is_contiguous(), name
    rows = weight_rows(spec_of(model), world_size=world_size, dtype="bfloat16", rank=rank, resident="full")
    assert cut.memory().weights_bytes == total_bytes(rows)


def test_a_rank_with_all_weights_encodes_alone() -> None:
    spec, folder = spec_of("tiny-k3"), GOLDEN / "tiny-k3-f32"
    alone = Runner.load(folder, spec, dtype="float32", group=TPGroup.single())
    group = TPGroup(rank=1, world_size=2, device=torch.device("cpu"))
    resident = Runner.load(folder, spec, dtype="float32", group=group, resident="full")
    grids = [Grid(1, 4, 6), Grid(2, 2, 2)]
    pixels = [np.random.default_rng(1).integers(0, 256, (grid.num_patches, 588), dtype=np.uint8) for grid in grids]
    outputs = [[np.zeros((grid.num_tokens, 4 * spec.text_hidden_size), np.uint8) for grid in grids] for _ in range(2)]
    alone.encode(grids, pixels, outputs[0])
    report = resident.encode_alone(grids, pixels, outputs[1])
    assert report.non_finite == ()
    assert all(map(np.array_equal, *outputs))
    assert resident.encode_alone([], [], []).forward_s == 0


def test_a_rank_with_a_shard_does_not() -> None:
    group = TPGroup(rank=0, world_size=2, device=torch.device("cpu"))
    runner = Runner.load(GOLDEN / "tiny-k3-f32", spec_of("tiny-k3"), dtype="float32", group=group)
    with pytest.raises(BatchError, match="holds a shard of the weights"):
        runner.encode_alone([], [], [])


def test_a_start_leaves_out_the_slowest_of_what_torch_imports_when_it_is_needed() -> None:
    command = [sys.executable, "-c", WARM_UP, str(GOLDEN / "tiny-k3-f32")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LAUNCH_TIMEOUT_S, check=False)
    assert (run.stdout.strip(), run.stderr) == ("False", "")
