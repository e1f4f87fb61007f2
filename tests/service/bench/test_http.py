"""`tpvision bench http`: its arithmetic, and loads on the tiny demo model and on a service that is already there."""

import json
import subprocess
from pathlib import Path

import pytest
from running import COMMAND, GOLDEN, ROOT, RunningService

from service.bench.http import Row, Run, Size, Traffic, row_of
from service.bench.load import FAILED, Load, Outcome
from service.bench.usage import Watched
from service.record import STAGES


def outcome(index: int, *, status: int = 200, late_s: float = 0.0) -> Outcome:
    """The index-th of a hundred, whose latency from its due time is as many milliseconds."""
    due_s = index / 10
    return Outcome(
        due_s=due_s,
        sent_s=due_s + late_s,
        latency_s=index / 1000 - late_s,
        status=status,
        picture=0,
        bytes_in=1000,
        stages_s={"decode": index / 10_000, "queue": 0.001},
    )


def row(
    outcomes: list[Outcome],
    *,
    rate: float | None = 10,
    cpu_s: float = 1.0,
    knows_others: bool = True,
    others_share: float = 0.01,
) -> Row:
    run = Run(
        load=Load(outcomes=outcomes, bytes_out=20_000, elapsed_s=10, cpu_s=cpu_s),
        livez_s=[0.001] * 98 + [0.002, 0.5],
        front_end_cpu_s=0.2,
        front_end_peak_bytes=1,
        rank_peak_bytes=2,
    )
    traffic = Traffic(sizes=[Size(28, 28, 1)], seconds=10, rate=rate, connections=4)
    return row_of(traffic, Watched(run, others_share), knows_others=knows_others)


def test_a_row_says_what_was_asked_for() -> None:
    opened, closed = row([outcome(1)]), row([outcome(1)], rate=None)
    assert (opened.rate, opened.connections, closed.rate, closed.connections) == (10, None, None, 4)


def test_percentiles_are_of_answers_with_embeddings_from_when_they_were_due() -> None:
    good = [outcome(index, late_s=0.0005) for index in range(1, 101)]
    found = row([*good, outcome(900, status=429)])
    assert (found.p50_s, found.p90_s, found.p99_s) == pytest.approx((0.050, 0.090, 0.099))
    assert found.stages_p50_s == {"decode": 0.005, "queue": 0.001}
    assert found.stages_p99_s["decode"] == pytest.approx(0.0099)
    assert found.livez_p99_s == 0.002


def test_counts_and_rates() -> None:
    found = row([*(outcome(index) for index in range(10)), outcome(1, status=503), outcome(2, status=FAILED)])
    assert found.statuses == {"failed": 1, "200": 10, "503": 1}
    assert (found.num_requests, found.images_per_s) == (12, 1.0)
    assert (found.bytes_in_per_s, found.bytes_out_per_s) == (1200, 2000)
    assert found.front_end_cpu_s == pytest.approx(0.2 / 12)


def test_without_a_good_answer_there_is_no_latency() -> None:
    found = row([outcome(1, status=503)])
    assert (found.p50_s, found.p99_s, found.stages_p50_s, found.images_per_s) == (None, None, {}, 0)


@pytest.mark.parametrize(
    ("cpu_s", "late_s", "marks"), [(1.0, 0.0, ""), (9.5, 0.0, "client-bound"), (1, 0.02, "client-bound")]
)
def test_a_client_that_cannot_keep_up_says_so(cpu_s: float, late_s: float, marks: str) -> None:
    found = row([outcome(index, late_s=late_s) for index in range(100)], cpu_s=cpu_s)
    assert (found.client_is_bottleneck, found.marks) == (bool(marks), marks)


def test_of_a_strangers_service_others_are_not_known() -> None:
    assert row([outcome(1)], others_share=0.5).is_disturbed
    found = row([outcome(1)], others_share=0.5, knows_others=False)
    assert (found.others_share, found.is_disturbed) == (None, False)


def bench(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, "bench", "http", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.slow
def test_a_service_of_its_own_is_loaded_open_and_closed() -> None:
    ended = bench(
        *("--model", "tiny-k3-f32", "--device", "cpu", "--json"),
        *("--rate", "30", "--connections", "2", "--seconds", "0.5"),
        *("--sizes", "28x28:3,56x84", "--form", "octet-stream", "--answer-dtype", "float16"),
        folder=GOLDEN,
    )
    assert ended.returncode == 0, ended.stderr
    opened, closed = json.loads(ended.stdout)["rows"]
    assert (opened["rate"], closed["rate"]) == (30, None)
    for found in (opened, closed):
        assert found["statuses"] == {"200": found["num_requests"]}
        assert found["form"] == "octet-stream" and found["dtype"] == "float16"
        assert found["stages_p50_s"].keys() == set(STAGES) - {"coalesce"}  # which needs the cache on
        assert found["p50_s"] <= found["p90_s"] <= found["p99_s"]
        assert found["front_end_cpu_s"] > 0 and found["livez_p99_s"] > 0
        assert found["others_share"] is not None


def test_a_running_service_is_loaded_by_its_url(tiny_k3: RunningService, tmp_path: Path) -> None:
    ended = bench("--url", tiny_k3.url, "--rate", "20", "--seconds", "0.5", "--sizes", "56x56")
    assert ended.returncode == 0, ended.stderr
    assert "20" in ended.stdout and "safetensors" in ended.stdout
    assert "others' CPU" not in ended.stdout  # nobody knows it there


def test_a_url_where_nobody_answers_ends_with_a_line() -> None:
    ended = bench("--url", "http://127.0.0.1:9", "--rate", "20")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.splitlines()[-1].startswith("tpvision: http://127.0.0.1:9 does not answer")


def test_nothing_to_send_is_a_usage_error() -> None:
    ended = bench("--url", "http://127.0.0.1:9")
    assert ended.returncode == 2
    assert "--rate or --connections" in ended.stderr


@pytest.mark.parametrize(("flag", "value"), [("--sizes", "28"), ("--sizes", "28x28:"), ("--rate", "fast")])
def test_malformed_flags_are_named(flag: str, value: str) -> None:
    ended = bench("--url", "http://127.0.0.1:9", flag, value)
    assert ended.returncode == 2
    assert flag in ended.stderr and "Traceback" not in ended.stderr
