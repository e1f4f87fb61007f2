"""`tpvision bench tower`: its arithmetic, and all of it on the tiny demo model over real ranks."""

import argparse
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from running import COMMAND, GOLDEN, ROOT, descendants, is_alive, wait_until

from service.bench.command import _batches
from service.bench.contenders import BASELINE, Contender, contenders
from service.bench.entrants import Entrant, Lap
from service.bench.tower import Race, Row, _chooser_note, label
from service.bench.usage import CpuWatch
from service.demo_model import demo_config, demo_preprocessor_config
from service.modes import ModeChooser
from tp.bench.messages import Hello, Rates
from tp.settings import load_settings
from tp.spec import PUBLISHED_K3, parse_spec
from tp.wire import Timing

MODEL = GOLDEN / "tiny-k3-f32"
ROW = Row(
    batch="1,024",
    contender="2 ranks",
    world_size=2,
    copies=1,
    device="CPU",
    threads=1,
    attention="flash",
    collectives="gloo",
    mode="tp",
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
    chooser_s=None,
    is_chosen=False,
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


def test_what_the_chooser_costs_is_told_over_batches_that_were_run_in_both_modes() -> None:
    tp = replace(ROW, chooser_s=0.5, is_chosen=True)
    dp = replace(ROW, mode="dp", seconds=0.4, chooser_s=0.6)
    other = replace(ROW, contender="2 ranks, gloo", seconds=0.1)
    assert tp.mark == "chosen"
    assert _chooser_note([tp, dp, other]) == [
        "chooser: what a service's mode chooser predicts, fitted before the first batch; chosen: the mode it would "
        "take, which took at most 25.0% longer than the better one, over 1 batch(es)."
    ]
    right = [replace(tp, batch="2 x 64", is_chosen=False), replace(dp, batch="2 x 64", is_chosen=True)]
    assert "25.0% longer than the better one, over 2 batch" in _chooser_note([tp, dp, *right])[0]
    assert _chooser_note([tp, other]) == []


def test_batches_have_names() -> None:
    assert (label([4096]), label([1024] * 16)) == ("4,096", "16 x 1,024")
    assert label([1024, 1024, 64]) == "2 x 1,024 + 1 x 64"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--images", "2x63"), "63 is not a multiple of 4"),
        (("--patches", "64,0"), "0 is not a multiple of 4"),
        (("--images", "0x64"), "0 is not at least 1"),
        (("--rounds", "0"), "0 is not at least 1"),
        (("--tp", "1,0"), "0 is not at least 1"),
        (("--seconds", "nan"), "nan is not over 0"),
        (("--patches", "many"), "invalid _sizes_in_patches value"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_started(
    arguments: tuple[str, str], message: str
) -> None:
    ended = bench(*arguments)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert message in ended.stderr and "Traceback" not in ended.stderr


def test_batches_are_named_by_count_and_size() -> None:
    assert _batches("16x1024,2x64+1x256") == [(1024,) * 16, (64, 64, 256)]
    with pytest.raises(argparse.ArgumentTypeError, match="'x64' is not of the form"):
        _batches("x64")


class PacedEntrant(Entrant):
    """Ranks that take what a pace in FLOP/s says, and keep a list of what they were told."""

    def __init__(self, contender: Contender, pace: float, told: list[str], device: str) -> None:
        super().__init__(contender, [])
        hello = Hello(
            rank=0,
            pid=1,
            device=device,
            threads=1,
            weights_bytes=1,
            resident_bytes=1,
            attention="flash",
            collectives="none",
        )
        self.ranks = [SimpleNamespace(hello=hello)] * contender.world_size  # type: ignore[list-item]
        self._pace, self._told = pace, told

    def warm_up(self, patches: Sequence[int], flops: int) -> None:
        self._told.append(f"warm up {self.contender.name} {label(patches)}")
        self.rate = self._pace

    def lap(self, patches: Sequence[int], flops: int, run_s: float) -> Lap:
        self._told.append(f"lap {self.contender.name} {label(patches)}")
        return Lap(flops / self._pace, 1, None)

    def count_tensors(self, patches: Sequence[int]) -> int:
        return 5

    def multiply(self, patches: int, seconds: float) -> Rates:
        self._told.append(f"multiply {patches}")
        return Rates(flops_per_s={"wo": 3 * self._pace})


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else uses the machine."""
    monkeypatch.setattr(CpuWatch, "others_share", lambda self: 0.0)


def chooser_of(dp_factor: float) -> ModeChooser:
    """For two ranks; an image takes so many times as long in data-parallel mode."""
    chooser = ModeChooser(PUBLISHED_K3, 2)
    sizes = {size: PUBLISHED_K3.cost(size) / 1000 for size in (64, 256)}
    timings = [
        Timing(mode=mode, num_images=2, num_patches=size, seconds=factor * seconds)
        for mode, factor in (("tp", 2.0), ("dp", dp_factor))  # tp encodes both, dp one on each rank
        for size, seconds in sizes.items()
    ]
    chooser.learn([timings])
    return chooser


def race_of(
    paces: dict[str, float],
    told: list[str],
    *,
    times_baseline: bool = True,
    dp_factor: float | None = None,
    device: str = "CPU",
) -> Race:
    settings = load_settings(flags={"model.path": MODEL}).settings
    ways = contenders(settings, PUBLISHED_K3, [1, 2], ["auto"], 2, has_many_images=True)
    found = {who.name: who for who in ways}
    entrants = [PacedEntrant(found[name], pace, told, device) for name, pace in paces.items()]
    told.clear()
    choosers = {entrants[-1].contender.kind: chooser_of(dp_factor)} if dp_factor else {}
    race = Race(PUBLISHED_K3, entrants, choosers, rounds=2, run_s=1, times_baseline=times_baseline)
    told.clear()  # the probes
    return race


@pytest.mark.usefixtures("quiet")
def test_contenders_take_turns_with_the_products_between() -> None:
    told: list[str] = []
    race = race_of({BASELINE: 1e12, "2 ranks": 2e12}, told)
    race.run([1024])
    laps = ["multiply 1024", f"lap {BASELINE} 1,024", "lap 2 ranks 1,024"]
    assert told == [f"warm up {BASELINE} 1,024", "warm up 2 ranks 1,024", *laps, *laps]
    baseline, ours = race.rows()
    assert (baseline.speedup, ours.speedup) == (1, pytest.approx(2))
    assert (baseline.mfu, ours.mfu) == (pytest.approx(1 / 3), pytest.approx(2 / 3))
    assert (ours.num_rounds, ours.torch_peak_bytes, ours.is_disturbed) == (2, 5, False)


@pytest.mark.usefixtures("quiet")
def test_of_a_packed_batch_the_products_have_all_rows_and_run_on_all_gpus() -> None:
    told: list[str] = []
    race = race_of({BASELINE: 1e12, "2 ranks": 4e12}, told, device="NVIDIA H200")
    race.run([1024, 1024, 4096])
    assert "multiply 6144" in told
    baseline, ours = race.rows()
    assert (baseline.product_rate, ours.product_rate) == (3e12, 6e12)
    assert (baseline.mfu, ours.mfu) == (pytest.approx(1 / 3), pytest.approx(2 / 3))


@pytest.mark.usefixtures("quiet")
def test_what_takes_long_is_run_once_and_not_warmed_up() -> None:
    told: list[str] = []
    race = race_of({BASELINE: 1e12, "2 ranks": 1e12}, told)
    race.run([65_536])  # 766 TFLOP
    assert told == ["multiply 65536", f"lap {BASELINE} 65,536", "lap 2 ranks 65,536"]
    assert [(row.num_rounds, row.torch_peak_bytes) for row in race.rows()] == [(1, None)] * 2


@pytest.mark.usefixtures("quiet")
def test_a_baseline_that_is_not_timed_still_multiplies() -> None:
    told: list[str] = []
    race = race_of({BASELINE: 1e12, "2 ranks": 2e12}, told, times_baseline=False)
    race.run([1024])
    assert told == ["warm up 2 ranks 1,024", *["multiply 1024", "lap 2 ranks 1,024"] * 2]
    (row,) = race.rows()
    assert (row.contender, row.speedup, row.product_rate) == ("2 ranks", None, 3e12)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(("dp_factor", "chosen"), [(1.5, "2 ranks, data-parallel"), (2.5, "2 ranks")])
def test_the_mode_that_the_chooser_would_take_is_marked(dp_factor: float, chosen: str) -> None:
    race = race_of({BASELINE: 1e12, "2 ranks": 1e12, "2 ranks, data-parallel": 1e12}, [], dp_factor=dp_factor)
    race.run([1024, 1024])
    race.run([1024])
    rows = race.rows()
    assert [row.contender for row in rows if row.is_chosen] == [chosen]
    stock, tp, dp, *lone = rows
    assert stock.chooser_s is None and all(row.chooser_s is None for row in lone)
    assert tp.chooser_s is not None and dp.chooser_s == pytest.approx(dp_factor / 2 * tp.chooser_s)


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    ended = bench(
        *("--demo", "tiny", "--patches", "64,256", "--images", "4x64", "--tp", "2", "--exchange", "gloo"),
        *("--rounds", "2", "--seconds", "0.02", "--json"),
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)  # type: ignore[no-any-return]


@pytest.mark.slow
def test_the_chooser_is_fitted_by_what_ranks_time(report: dict[str, Any]) -> None:
    predicted = [row["contender"] for row in report["rows"] if row["chooser_s"] is not None]
    chosen = [row["contender"] for row in report["rows"] if row["is_chosen"]]
    assert predicted == ["2 ranks, gloo", "2 ranks, data-parallel"]
    assert len(chosen) == 1 and chosen[0] in predicted
    assert "longer than the better one, over 1 batch(es)" in report["notes"][-1]


@pytest.mark.slow
def test_every_batch_is_run_on_every_contender(report: dict[str, Any]) -> None:
    who = [(row["batch"], row["contender"]) for row in report["rows"]]
    names = (BASELINE, "2 ranks, gloo")
    lone = [(batch, name) for batch in ("64", "256", "4 x 64") for name in names]
    assert who == [*lone, ("4 x 64", "2 ranks, data-parallel"), ("4 x 64", "2 processes")]


@pytest.mark.slow
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
        assert (row["dtype"], row["device"]) == ("float32", "CPU")
        assert (row["collectives"] == "none") == (row["world_size"] == 1)
        assert row["attention"].startswith("flash attention on CPU") == (row["contender"] == BASELINE)
        assert row["torch_peak_bytes"] > 4 * row["num_images"] * row["patches"] * spec.hidden_size
        assert row["peak_growth_bytes"] is None or row["peak_growth_bytes"] > 0


@pytest.mark.slow
def test_what_is_predicted_grows_with_the_formula(report: dict[str, Any]) -> None:
    spec = parse_spec(demo_config("tiny"), demo_preprocessor_config())
    rows = {(row["batch"], row["contender"]): row for row in report["rows"]}
    first, second = rows["64", "2 ranks, gloo"], rows["256", "2 ranks, gloo"]
    assert first["predicted_s"] == pytest.approx(first["seconds"])
    assert second["predicted_s"] == pytest.approx(first["seconds"] * spec.flops(256) / spec.flops(64))


def test_a_folder_without_tensors_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    shutil.copytree(MODEL, tmp_path / "model")
    for shard in (tmp_path / "model").glob("*.safetensors"):
        shard.unlink()
    ended = bench("--model", str(tmp_path / "model"))
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ".safetensors" in ended.stderr and "Traceback" not in ended.stderr


@pytest.mark.slow
def test_a_benchmark_that_is_told_to_stop_leaves_nothing(tmp_path: Path) -> None:
    command = [*COMMAND, "bench", "tower", "--model", str(MODEL), "--tp", "1"]
    with subprocess.Popen(command, cwd=ROOT, env={**os.environ, "TMPDIR": str(tmp_path)}) as process:
        wait_until(lambda: any(tmp_path.glob("tpvision-bench-*/socket")), 60)
        pids = descendants(process.pid)
        process.terminate()
        assert process.wait(30) == 130
    wait_until(lambda: not any(map(is_alive, pids)))
    assert not any(tmp_path.glob("tpvision-*"))


@pytest.mark.slow
def test_a_rank_that_ends_ends_the_benchmark_with_a_line() -> None:
    ended = bench("--model", str(MODEL), "--tp", "1", CUDA_VISIBLE_DEVICES="", TPVISION_PARALLEL__DEVICE="cuda")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.splitlines()[-1] == "tpvision: a rank of stock torch ended"
