"""`tpvision bench tower`: its arithmetic, and all of it on the tiny demo model over real ranks."""

import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from running import COMMAND, GOLDEN, ROOT

from service.bench.tower import BASELINE, Contender, Row, contenders, label
from service.demo_model import demo_config, demo_preprocessor_config
from tp.settings import load_settings
from tp.spec import SpecError, parse_spec

MODEL = GOLDEN / "tiny-k3-f32"
ROW = Row(
    batch="1,024",
    contender="2 ranks",
    world_size=2,
    copies=1,
    threads=1,
    attention="flash",
    dtype="float32",
    num_images=4,
    patches=1024,
    seconds=0.5,
    fastest_s=0.4,
    slowest_s=0.6,
    num_forwards=2,
    num_rounds=3,
    flops=100_000_000_000,
    product_rate=400e9,
    product_rates={"wo": 300e9, "fc0": 400e9},
    baseline_s=1.0,
    predicted_s=0.5,
    weights_bytes=1,
    peak_growth_bytes=None,
    torch_peak_bytes=None,
    others_share=0.0,
    is_disturbed=False,
)


def bench(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, "bench", "tower", *arguments]
    environ = {**os.environ, "TPVISION_PARALLEL__DEVICE": "cpu", **environ}
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=200, check=False)


def test_mfu_is_the_rate_over_that_of_the_best_product() -> None:
    assert (ROW.rate, ROW.mfu, ROW.images_per_s, ROW.speedup) == (200e9, 0.5, 8, 2)


def test_without_a_baseline_there_is_no_speedup() -> None:
    assert replace(ROW, baseline_s=None).speedup is None


def test_a_disturbed_row_is_marked() -> None:
    assert (ROW.mark, replace(ROW, is_disturbed=True).mark) == ("", "disturbed")


def test_batches_have_names() -> None:
    assert (label([4096]), label([1024] * 16)) == ("4,096", "16 x 1,024")


def entries(world_sizes: list[int], num_cores: int, *, has_many_images: bool) -> list[Contender]:
    settings = load_settings(flags={"model.path": MODEL}).settings
    return contenders(settings, world_sizes, num_cores, has_many_images=has_many_images)


def test_cores_are_shared_out_and_the_baseline_has_all_of_them() -> None:
    found = entries([1, 2, 3], 6, has_many_images=False)
    assert (found[0].name, found[0].is_stock) == (BASELINE, True)
    assert [(who.world_size, who.settings.parallel.threads) for who in found] == [(1, 6), (1, 6), (2, 3), (3, 2)]


def test_many_images_are_run_by_independent_processes_too() -> None:
    last = entries([1, 2], 2, has_many_images=True)[-1]
    assert (last.copies, last.world_size, last.settings.parallel.threads) == (2, 1, 1)
    assert [last.takes([64] * count) for count in (1, 2, 3, 16)] == [False, True, False, True]
    assert [who.copies for who in entries([1], 2, has_many_images=True)] == [1, 1]


def test_a_world_size_that_the_heads_do_not_allow_is_refused() -> None:
    with pytest.raises(SpecError, match="12 attention heads"):
        entries([5], 2, has_many_images=False)


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    ended = bench(
        *("--demo", "tiny", "--patches", "64,256", "--images", "4x64", "--rounds", "2", "--seconds", "0.05", "--json")
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)  # type: ignore[no-any-return]


def test_every_batch_is_run_on_every_contender(report: dict[str, Any]) -> None:
    who = [(row["batch"], row["contender"]) for row in report["rows"]]
    lone = [(batch, name) for batch in ("64", "256", "4 x 64") for name in (BASELINE, "1 rank", "2 ranks")]
    assert who == [*lone, ("4 x 64", "2 independent processes")]


def test_rows_are_consistent(report: dict[str, Any]) -> None:
    spec = parse_spec(demo_config("tiny"), demo_preprocessor_config())
    for row in report["rows"]:
        assert row["flops"] == row["num_images"] * spec.flops(row["patches"])
        assert row["rate"] == pytest.approx(row["flops"] / row["seconds"])
        assert row["mfu"] == pytest.approx(row["rate"] / row["product_rate"])
        assert row["fastest_s"] <= row["seconds"] <= row["slowest_s"]
        assert row["num_rounds"] == 2 and row["num_forwards"] >= 1
        assert set(row["product_rates"]) == {"wqkv", "wo", "fc0", "fc1"}
        assert row["product_rate"] >= min(row["product_rates"].values())
        assert row["dtype"] == "float32"
        assert row["attention"].startswith("flash attention on CPU") == (row["contender"] == BASELINE)
        assert row["torch_peak_bytes"] > 4 * row["num_images"] * row["patches"] * spec.hidden_size
        assert row["peak_growth_bytes"] is None or row["peak_growth_bytes"] > 0


def test_what_is_predicted_grows_with_the_formula(report: dict[str, Any]) -> None:
    spec = parse_spec(demo_config("tiny"), demo_preprocessor_config())
    rows = {(row["batch"], row["contender"]): row for row in report["rows"]}
    first, second = rows["64", "2 ranks"], rows["256", "2 ranks"]
    assert first["predicted_s"] == pytest.approx(first["seconds"])
    assert second["predicted_s"] == pytest.approx(first["seconds"] * spec.flops(256) / spec.flops(64))


def test_a_folder_without_tensors_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    shutil.copytree(MODEL, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors.index.json").unlink()
    ended = bench("--model", str(tmp_path / "model"))
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "model.safetensors" in ended.stderr and "Traceback" not in ended.stderr


def test_a_rank_that_ends_ends_the_benchmark_with_a_line() -> None:
    ended = bench("--model", str(MODEL), "--tp", "1", CUDA_VISIBLE_DEVICES="", TPVISION_PARALLEL__DEVICE="cuda")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.splitlines()[-1] == "tpvision: a rank of stock torch ended"


def test_nothing_but_json_is_on_standard_output() -> None:
    ended = bench(
        *("--demo", "tiny", "--patches", "64", "--tp", "1", "--rounds", "1", "--seconds", "0.01", "--no-baseline"),
        "--json",
    )
    assert [row["contender"] for row in json.loads(ended.stdout)["rows"]] == ["1 rank"]
