"""A rank dies or hangs at any point of a batch: noticed at once, replaced, and every request still gets its answer."""

import concurrent.futures
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import httpx
import pytest
import torch
from make_photograph import acceptance_picture
from running import GOLDEN, RunningService, assert_balanced, ranks_of, torchrun_of, wait_until
from safetensors.torch import load

pytestmark = pytest.mark.faults

MODEL = str(GOLDEN / "tiny-k3-f32")
MARKED = acceptance_picture(28 * 7, 28)  # the image that the faults are about
MARKED_TOKENS = 7
GOOD = (GOLDEN / "images" / "rgb_64x48.png").read_bytes()
FAULTS = Path(__file__).parent

# Losses are forgotten after a second, so that back-off stays short however many tests share the service.
FORGETFUL = {"TPVISION_PARALLEL__RESTART_WINDOW_S": "1", "TPVISION_PARALLEL__MAX_RESTARTS": "3"}


class Faulty:
    """A service whose ranks misbehave as `arm` says."""

    def __init__(self, file: Path, start: Callable[..., RunningService], *ranks: str, **environ: str) -> None:
        self.file = file
        self.gate = file.with_name("gate")
        self.gate.touch()
        self.arm("nothing", times=0)
        environ = {"PYTHONPATH": str(FAULTS), "TP_FAULT": str(file), **FORGETFUL, **environ}
        self.service = start("--model", MODEL, *ranks, **environ)
        self.idle_since_s = time.monotonic()

    def arm(self, what: str, *, times: int = 1, rank: int = 1, where: str = "before", **more: float) -> None:
        fault = {"what": what, "times": times, "rank": rank, "where": where, "tokens": MARKED_TOKENS, **more}
        fault["gate"] = str(self.gate)
        self.file.write_text(json.dumps(fault))

    @property
    def fired_at(self) -> float:
        return self.file.stat().st_mtime

    def num_accepted(self) -> int:
        return int(self.service.client.get("/v1/capacity").json()["requests"]["accepted"])

    def wait_ready(self) -> None:
        wait_until(lambda: self.service.client.get("/readyz").status_code == 200, timeout_s=30)

    def send_with_neighbours(self) -> tuple[httpx.Response, list[httpx.Response]]:
        """The marked image among good ones, all at the same time; the fault waits until all of them are accepted."""
        accepted = self.num_accepted()
        self.gate.unlink()
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            before = [pool.submit(self.service.encode, GOOD) for _ in range(3)]
            marked = pool.submit(self.service.encode, MARKED)
            after = [pool.submit(self.service.encode, GOOD) for _ in range(3)]
            try:
                wait_until(lambda: self.num_accepted() == accepted + 7)
            finally:
                self.gate.touch()
            return marked.result(), [each.result() for each in before + after]


@pytest.fixture(scope="module")
def make_faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Faulty]]:
    made: list[Faulty] = []

    def start(*arguments: str, **environ: str) -> RunningService:
        return RunningService(list(arguments), environ).wait_ready()

    def make(*ranks: str, **environ: str) -> Faulty:
        ranks = ranks or ("--tp", "2")
        made.append(Faulty(tmp_path_factory.mktemp("faults") / "fault.json", start, *ranks, **environ))
        return made[-1]

    yield make
    for each in made:
        assert_balanced(each.service)
        assert each.service.stop() == 0


@pytest.fixture(scope="module")
def shared(make_faulty: Callable[..., Faulty]) -> Faulty:
    return make_faulty(TPVISION_LIMITS__BATCH_TIMEOUT_S="3", TPVISION_PARALLEL__COLLECTIVE_TIMEOUT_S="5")


@pytest.fixture
def victim(shared: Faulty) -> Iterator[Faulty]:
    """The shared service, ready, and afterwards whole again."""
    shared.wait_ready()
    yield shared
    shared.arm("nothing", times=0)
    shared.wait_ready()
    assert shared.service.encode(GOOD).status_code == 200
    shared.idle_since_s = time.monotonic()
    assert_balanced(shared.service)


def lost_at(service: RunningService) -> float:
    """Unix time of the last log line that says that a group is lost."""
    line = next(line for line in reversed(service.log) if "is lost" in line)
    return datetime.fromisoformat(json.loads(line)["timestamp"]).timestamp()


def lost(victim: Faulty, **labels: str) -> float:
    return victim.service.scrape().value("lost_ranks_total", group="0", **labels)


@pytest.mark.parametrize("where", ["before", "during", "after"])
@pytest.mark.parametrize("what", ["raise", "exit 0", "kill", "memory"])
def test_a_rank_that_dies_costs_nobody_an_answer(victim: Faulty, what: str, where: str) -> None:
    before = load(victim.service.encode(GOOD).content)["embeddings"]
    num_lost = lost(victim)
    victim.arm(what, where=where)
    marked, neighbours = victim.send_with_neighbours()
    assert [answer.status_code for answer in [marked, *neighbours]] == [200] * 7
    for answer in neighbours:
        torch.testing.assert_close(load(answer.content)["embeddings"], before, rtol=0, atol=1e-4)
    assert lost_at(victim.service) - victim.fired_at < 1
    assert lost(victim) == num_lost + 1


@pytest.mark.parametrize("where", ["before", "during"])
def test_with_two_batches_in_flight_it_costs_nobody_an_answer_either(
    make_faulty: Callable[..., Faulty], where: str
) -> None:
    room = {"TPVISION_CAPACITY__PATCH_CAPACITIES": "32", "TPVISION_CAPACITY__SLAB_PATCHES": "1024"}  # one image a batch
    victim = make_faulty(TP_IN_FLIGHT="2", **room)
    victim.arm("kill", where=where)
    marked, neighbours = victim.send_with_neighbours()
    assert [answer.status_code for answer in [marked, *neighbours]] == [200] * 7
    victim.wait_ready()
    victim.arm("kill", where=where, times=2)
    marked, neighbours = victim.send_with_neighbours()
    assert (marked.status_code, marked.json()["error"]["code"]) == (500, "encode_failed")
    assert [answer.status_code for answer in neighbours] == [200] * 6


@pytest.mark.parametrize("what", ["sleep", "stop", "mismatch"])
def test_a_rank_that_hangs_is_ended_at_the_batch_deadline(victim: Faulty, what: str) -> None:
    kind = {} if what == "mismatch" else {"reason": "hung"}  # gloo may notice a mismatch before the deadline
    num_lost = lost(victim, **kind)
    victim.arm(what, where="during")
    marked, neighbours = victim.send_with_neighbours()
    assert [answer.status_code for answer in [marked, *neighbours]] == [200] * 7
    assert lost(victim, **kind) == num_lost + 1
    assert lost_at(victim.service) - victim.fired_at < 4.5  # the deadline is 3 s, the collective's 5 s


def test_a_slow_batch_ends_in_its_answer(victim: Faulty) -> None:
    victim.arm("slow", rank=0, seconds=2)
    assert victim.service.encode(MARKED).status_code == 200


def test_an_image_without_finite_tokens_fails_alone(victim: Faulty) -> None:
    victim.arm("nan", rank=0, where="nowhere")
    marked, neighbours = victim.send_with_neighbours()
    assert (marked.status_code, marked.json()["error"]["code"]) == (500, "non_finite_output")
    assert [answer.status_code for answer in neighbours] == [200] * 6
    assert victim.service.encode(MARKED).status_code == 200


def test_while_the_group_is_down_it_says_so(victim: Faulty) -> None:
    client = victim.service.client
    os.kill(ranks_of(victim.service)[0], signal.SIGKILL)
    wait_until(lambda: client.get("/readyz").status_code == 503, timeout_s=1)
    assert client.get("/livez").status_code == 200
    refused = victim.service.encode(GOOD)
    assert (refused.status_code, int(refused.headers["retry-after"]) >= 1) == (503, True)


def test_a_stopped_idle_rank_is_noticed_at_the_next_request(victim: Faulty) -> None:
    os.kill(ranks_of(victim.service)[1], signal.SIGSTOP)
    assert victim.service.encode(GOOD).status_code == 200


def test_a_killed_torchrun_is_replaced(victim: Faulty) -> None:
    old = ranks_of(victim.service)
    os.kill(torchrun_of(victim.service), signal.SIGKILL)
    wait_until(lambda: victim.service.client.get("/readyz").status_code == 503, timeout_s=1)
    victim.wait_ready()
    assert not set(old) & set(ranks_of(victim.service))


def test_a_torchrun_killed_while_its_ranks_start_is_replaced() -> None:
    service = RunningService(["--model", MODEL, "--tp", "2"])
    wait_until(lambda: len(ranks_of(service)) == 2, timeout_s=30)
    os.kill(torchrun_of(service), signal.SIGKILL)
    assert service.wait_ready().encode(GOOD).status_code == 200
    assert service.stop() == 0


def test_requests_end_at_their_deadline_whatever_the_workers_do(make_faulty: Callable[..., Faulty]) -> None:
    victim = make_faulty(TPVISION_LIMITS__REQUEST_TIMEOUT_S="1")
    victim.arm("kill")
    lost = victim.service.encode(MARKED)  # a new group takes longer than that
    assert (lost.status_code, lost.json()["error"]["code"]) == (503, "workers_lost")
    assert int(lost.headers["retry-after"]) >= 1
    victim.wait_ready()
    victim.arm("slow", seconds=2)
    slow = victim.service.encode(MARKED)
    assert (slow.status_code, slow.json()["error"]["code"]) == (504, "deadline_exceeded")
    wait_until(lambda: victim.service.client.get("/v1/capacity").json()["in_flight"]["free_patches"] == 65536)
    assert victim.service.encode(GOOD).status_code == 200


@pytest.mark.parametrize("groups", [1, 2])
def test_a_poison_image_is_given_up_and_does_not_burn_the_budget(
    make_faulty: Callable[..., Faulty], groups: int
) -> None:
    budget = {"TPVISION_PARALLEL__RESTART_WINDOW_S": "600", "TPVISION_PARALLEL__MAX_RESTARTS": "1"}
    victim = make_faulty("--tp", "1", "--groups", str(groups), **budget)
    for _ in range(2):  # four losses, one allowed for each group; of two, it is lost with one and then with the other
        wait_until(lambda: len(victim.service.client.get("/v1/capacity").json()["ranks"]) == groups, timeout_s=30)
        victim.arm("kill", rank=0, where="during", times=2)
        marked, neighbours = victim.send_with_neighbours()
        assert (marked.status_code, marked.json()["error"]["code"]) == (500, "encode_failed")
        assert [answer.status_code for answer in neighbours] == [200] * 6
    wait_until(lambda: len(victim.service.client.get("/v1/capacity").json()["ranks"]) == groups, timeout_s=30)


def test_a_group_that_cannot_stay_up_ends_the_service_with_the_root_cause(tmp_path: Path) -> None:
    file = tmp_path / "fault.json"
    file.write_text(json.dumps({"what": "raise", "rank": 1, "tokens": 0, "where": "before", "times": 99}))
    environ = {"PYTHONPATH": str(FAULTS), "TP_FAULT": str(file), "TPVISION_PARALLEL__MAX_RESTARTS": "1"}
    service = RunningService(["--model", MODEL, "--tp", "2"], environ)
    assert service.process.wait(60) == 1
    service.stop()
    assert "injected" in service.log[-1]
    assert "2 times" in service.log[-1]


def test_a_rank_elsewhere_that_hangs_while_it_starts_is_ended_at_its_limit(tmp_path: Path) -> None:
    file = tmp_path / "fault.json"
    file.write_text(json.dumps({"what": "stop", "rank": 1, "tokens": 0, "where": "before", "times": 1}))
    arguments = ["--model", MODEL, "--tp", "2", "--socket", str(tmp_path / "control.sock")]
    environ = {"PYTHONPATH": str(FAULTS), "TP_FAULT": str(file), "TPVISION_PARALLEL__START_TIMEOUT_S": "20"}
    service = RunningService([*arguments, "--workers", "external"])
    worker = RunningService(arguments, environ, subcommand="worker")
    try:
        assert service.wait_ready().encode(GOOD).status_code == 200
        assert any("it was not ready within 20 s" in line for line in worker.log)
        assert service.stop() == 0
    finally:
        service.stop()
        worker.stop(signal.SIGINT)


def test_the_service_ends_when_its_last_group_is_given_up() -> None:
    environ = {"TPVISION_PARALLEL__MAX_RESTARTS": "0"}
    service = RunningService(["--model", MODEL, "--tp", "1", "--groups", "2"], environ).wait_ready()
    wait_until(lambda: len(service.client.get("/v1/capacity").json()["ranks"]) == 2, timeout_s=30)
    first, last = ranks_of(service)
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: any("serve on without it" in line for line in service.log))
    assert service.encode(GOOD).status_code == 200
    os.kill(last, signal.SIGKILL)
    assert service.process.wait(20) == 1
    service.stop()
    assert "root cause" in service.log[-1]


def test_of_two_groups_the_other_keeps_serving(start_service: Callable[..., RunningService]) -> None:
    service = start_service("--model", MODEL, "--tp", "1", "--groups", "2", **FORGETFUL)
    wait_until(lambda: len(service.client.get("/v1/capacity").json()["ranks"]) == 2, timeout_s=30)
    probes: list[int] = []
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(service.encode, GOOD) for _ in range(150)]
        os.kill(ranks_of(service)[0], signal.SIGKILL)
        while not all(answer.done() for answer in answers):
            probes.append(service.client.get("/readyz").status_code)
    assert {answer.result().status_code for answer in answers} == {200}
    assert set(probes) == {200}
    wait_until(lambda: len(service.client.get("/v1/capacity").json()["ranks"]) == 2, timeout_s=30)
    assert_balanced(service)


def test_an_idle_group_outlives_its_collective_timeout(shared: Faulty) -> None:
    before = ranks_of(shared.service)
    time.sleep(max(0, shared.idle_since_s + 20 - time.monotonic()))  # the timeout is 5 s
    assert shared.service.encode(GOOD).status_code == 200
    assert ranks_of(shared.service) == before
