"""The load client against little servers that do what a test wants."""

import asyncio
import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop
from running import ROOT

from service.bench.load import FAILED, Load, Picture, Plan, arrivals, parse_stages, run

OK = b"HTTP/1.1 200 OK\r\nserver-timing: decode;dur=1.5, queue;dur=0.25\r\ncontent-length: 5\r\n\r\nhello"
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    files = [tmp_path / name for name in ("a", "b")]
    for file in files:
        file.write_bytes(file.name.encode() * 100)
    pictures = [Picture(file=files[0], weight=3), Picture(file=files[1], weight=1)]
    return Plan(
        url="http://127.0.0.1:9/v1/encode?dtype=float32",
        headers={"accept": "*/*"},
        pictures=pictures,
        seed=1,
        seconds=0.3,
        rate=200,
        connections=8,
    )


async def read_request(reader: asyncio.StreamReader) -> bytes:
    """Head and body of the next request; no bytes at the end."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionResetError):
        return b""
    length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length"))
    return head + await reader.readexactly(length)


def load_of(plan: Plan, handler: Handler, **changes: object) -> Load:
    """Run the plan against a server that handles each connection like this."""

    handled: list[asyncio.Future[None]] = []

    def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handled.append(asyncio.ensure_future(handler(reader, writer)))

    async def work() -> Load:
        async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            url = plan.url.replace(":9/", f":{port}/")
            load = await run(plan.model_copy(update={"url": url, **changes}))
            await asyncio.wait_for(asyncio.gather(*handled), 10)
            return load

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work())


async def answer_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while await read_request(reader):
        writer.write(OK)
    writer.close()


def test_arrivals_are_poisson_and_the_same_for_a_seed(plan: Plan) -> None:
    long = plan.model_copy(update={"seconds": 100.0, "rate": 50.0})
    due = list(arrivals(long))
    assert due == list(arrivals(long))
    assert due != list(arrivals(long.model_copy(update={"seed": 2})))
    assert due == sorted(due) and due[-1] < 100
    gaps = [after - before for before, after in itertools.pairwise(due)]
    assert len(due) == pytest.approx(5000, rel=0.05)
    assert statistics.pstdev(gaps) == pytest.approx(statistics.mean(gaps), rel=0.05)  # as exponential gaps have it


def test_open_loop_sends_what_is_due(plan: Plan) -> None:
    load = load_of(plan, answer_all)
    assert [outcome.due_s for outcome in load.outcomes] == list(arrivals(plan))
    assert {outcome.status for outcome in load.outcomes} == {200}
    assert all(outcome.sent_s >= outcome.due_s for outcome in load.outcomes)
    assert {outcome.bytes_in for outcome in load.outcomes} == {5}
    assert load.outcomes[0].stages_s == {"decode": 0.0015, "queue": 0.00025}
    assert load.bytes_out == 100 * len(load.outcomes)
    assert load.cpu_s > 0 and load.elapsed_s >= load.outcomes[-1].due_s


def test_open_loop_does_not_wait_for_answers(plan: Plan) -> None:
    num_due = len(list(arrivals(plan)))
    num_come = 0
    all_have_come = asyncio.Event()

    async def answer_when_all_have_come(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_come
        await read_request(reader)
        num_come += 1
        if num_come == num_due:
            all_have_come.set()
        await asyncio.wait_for(all_have_come.wait(), 60)
        writer.write(OK)
        writer.close()

    load = load_of(plan, answer_when_all_have_come, connections=num_due)
    assert [outcome.status for outcome in load.outcomes] == [200] * num_due


def test_closed_loop_keeps_so_many_in_flight(plan: Plan) -> None:
    in_flight: list[int] = [0]
    most = 0

    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal most
        while await read_request(reader):
            in_flight[0] += 1
            most = max(most, in_flight[0])
            await asyncio.sleep(0.02)
            in_flight[0] -= 1
            writer.write(OK)
        writer.close()

    load = load_of(plan, count, rate=None, connections=3)
    assert most == 3
    assert len(load.outcomes) >= 6
    assert {outcome.status for outcome in load.outcomes} == {200}


def test_pictures_are_chosen_by_weight(plan: Plan) -> None:
    load = load_of(plan, answer_all, rate=1000, seconds=0.5)
    first = sum(outcome.picture == 0 for outcome in load.outcomes)
    assert first / len(load.outcomes) == pytest.approx(0.75, abs=0.1)


def test_the_request_is_what_the_plan_says(plan: Plan) -> None:
    seen: list[bytes] = []

    async def keep(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while request := await read_request(reader):
            seen.append(request)
            writer.write(OK)
        writer.close()

    load_of(plan, keep)
    head, _, body = seen[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/encode?dtype=float32 HTTP/1.1\r\nhost: 127.0.0.1:")
    assert b"\r\naccept: */*\r\ncontent-length: 100" in head
    assert body in (b"a" * 100, b"b" * 100)


@pytest.mark.parametrize(
    "answer",
    [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf", b"not HTTP\r\n\r\n"],
    ids=["none", "half", "odd"],
)
def test_what_is_not_an_answer_is_a_failed_request(plan: Plan, answer: bytes) -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(answer)
        writer.close()

    load = load_of(plan, hang_up)
    assert {outcome.status for outcome in load.outcomes} == {FAILED}
    assert load.bytes_out == 0


def test_refusals_are_kept_with_their_status(plan: Plan) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await read_request(reader):
            writer.write(b"HTTP/1.1 429 Too Many Requests\r\nretry-after: 1\r\ncontent-length: 2\r\n\r\n{}")
        writer.close()

    assert {outcome.status for outcome in load_of(plan, refuse).outcomes} == {429}


def test_a_port_where_nobody_listens_fails_every_request(plan: Plan) -> None:
    load = asyncio.run(run(plan))
    assert {outcome.status for outcome in load.outcomes} == {FAILED}


def test_it_is_a_process_that_reads_a_plan_and_writes_a_load(plan: Plan) -> None:
    command = [sys.executable, "-m", "service.bench.load"]
    ended = subprocess.run(
        command, cwd=ROOT, input=plan.model_dump_json(), capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.stderr == ""
    assert len(Load.model_validate(json.loads(ended.stdout)).outcomes) == len(list(arrivals(plan)))


def test_stages_without_a_duration_are_left_out() -> None:
    assert parse_stages("a;dur=2, b, c;dur=0.5") == {"a": 0.002, "c": 0.0005}
    assert parse_stages("") == {}
