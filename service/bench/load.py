"""The client of a load test, in a process of its own: requests leave when they are due, however long answers take.

`service.bench.http` starts it, writes a `Plan` to its standard input and reads a `Load` from its standard output.
Answers' bodies are counted and thrown away. It says how late requests left and how much CPU it took, so that nobody
takes its own limits for the service's. HTTP is httptools' parser over one reused buffer, since a general client would
take more time than what is measured.
"""

import asyncio
import random
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import httptools
import uvloop
from pydantic import BaseModel, ConfigDict, Field

_BUFFER_BYTES = 2**18
_SETTLE_S = 60.0  # after the last request left; what is not answered by then counts as failed
FAILED = 0  # the status of a request without an answer


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Picture(_Strict):
    """A file to send, and how often it is chosen beside the others."""

    file: Path
    weight: float = Field(gt=0)


class Plan(_Strict):
    """What to send. Open loop with a `rate`: Poisson arrivals. Closed without: each connection waits for its answer."""

    url: str  # with path and query
    headers: dict[str, str]
    pictures: list[Picture]
    seed: int
    seconds: float
    rate: float | None
    connections: int  # at most, or of the closed loop


class Outcome(_Strict):
    """One request. Seconds, the first two after the load's start."""

    due_s: float
    sent_s: float
    latency_s: float  # from when it was sent to the last byte of its answer
    status: int
    picture: int
    bytes_in: int  # of the answer's body
    stages_s: dict[str, float]  # by Server-Timing


class Load(_Strict):
    """All requests in the order in which they were due, and what sending them took."""

    outcomes: list[Outcome]
    bytes_out: int  # of bodies
    elapsed_s: float
    cpu_s: float


def main() -> None:
    """Do what standard input says."""
    plan = Plan.model_validate_json(sys.stdin.read())
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        load = runner.run(run(plan))
    sys.stdout.write(load.model_dump_json())


async def run(plan: Plan) -> Load:
    """Send it all, and wait for the answers."""
    sender = _Sender(plan)
    started_s, cpu_s = time.monotonic(), time.process_time()
    work = sender.closed_loop(started_s) if plan.rate is None else sender.open_loop(started_s, arrivals(plan))
    outcomes = await work
    sender.close()
    return Load(
        outcomes=outcomes,
        bytes_out=sum(len(sender.bodies[outcome.picture]) for outcome in outcomes if outcome.status != FAILED),
        elapsed_s=time.monotonic() - started_s,
        cpu_s=time.process_time() - cpu_s,
    )


def arrivals(plan: Plan) -> Iterator[float]:
    """When requests are due, in seconds after the start: gaps are exponential, and the same for a seed."""
    assert plan.rate is not None
    choose = random.Random(plan.seed)
    due_s = choose.expovariate(plan.rate)
    while due_s < plan.seconds:
        yield due_s
        due_s += choose.expovariate(plan.rate)


def parse_stages(value: str) -> dict[str, float]:
    """Seconds by stage of a Server-Timing header."""
    entries = (entry.strip().partition(";dur=") for entry in value.split(","))
    return {name: float(ms) / 1000 for name, separator, ms in entries if separator}


class _Sender:
    """The connections, and what each request needs."""

    def __init__(self, plan: Plan) -> None:
        self.bodies = [picture.file.read_bytes() for picture in plan.pictures]
        self._plan = plan
        self._choose = random.Random(plan.seed + 1)
        parts = urlsplit(plan.url)
        self._address = parts.hostname or "", parts.port or 80
        target = f"{parts.path}?{parts.query}" if parts.query else parts.path
        head = f"POST {target} HTTP/1.1\r\nhost: {parts.netloc}\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in plan.headers.items())
        self._heads = [f"{head}content-length: {len(body)}\r\n\r\n".encode() for body in self.bodies]
        self._idle: deque[_Connection] = deque()
        self._free = asyncio.Semaphore(plan.connections)

    async def open_loop(self, started_s: float, due: Iterator[float]) -> list[Outcome]:
        """One request at each of these times."""
        tasks = []
        for due_s in due:
            while (left_s := started_s + due_s - time.monotonic()) > 0:  # noqa: ASYNC110 - nobody tells the time
                await asyncio.sleep(left_s)  # uvloop counts in milliseconds, and may wake up before
            tasks.append(asyncio.create_task(self._send(started_s, due_s)))
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=_SETTLE_S)
            for task in late:
                task.cancel()
        return list(await asyncio.gather(*tasks))

    async def closed_loop(self, started_s: float) -> list[Outcome]:
        """One request after the other on every connection, until the time is over."""
        outcomes: list[Outcome] = []

        async def one() -> None:
            while (now_s := time.monotonic() - started_s) < self._plan.seconds:
                outcomes.append(await self._send(started_s, now_s))

        await asyncio.gather(*(one() for _ in range(self._plan.connections)))
        return sorted(outcomes, key=lambda outcome: outcome.due_s)

    def close(self) -> None:
        """Hang up."""
        for connection in self._idle:
            connection.close()

    async def _send(self, started_s: float, due_s: float) -> Outcome:
        """One request over a connection of its own for so long. Never raises: a failure is an outcome."""
        picture = self._choose.choices(range(len(self.bodies)), [one.weight for one in self._plan.pictures])[0]
        connection = None
        sent_s = time.monotonic()
        try:
            async with self._free:
                connection = await self._connect()
                sent_s = time.monotonic()
                await connection.post(self._heads[picture], self.bodies[picture])
                latency_s = time.monotonic() - sent_s
                if connection.is_reusable:
                    self._idle.append(connection)
            status, stages_s, bytes_in = connection.status, parse_stages(connection.timing), connection.bytes_in
        except (OSError, asyncio.CancelledError):
            status, stages_s, bytes_in, latency_s = FAILED, {}, 0, time.monotonic() - sent_s
            if connection is not None:
                connection.close()
        return Outcome(
            due_s=due_s,
            sent_s=sent_s - started_s,
            latency_s=latency_s,
            status=status,
            picture=picture,
            bytes_in=bytes_in,
            stages_s=stages_s,
        )

    async def _connect(self) -> "_Connection":
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closed:
                return connection
        _, connection = await asyncio.get_running_loop().create_connection(_Connection, *self._address)
        return connection


class _Connection(asyncio.BufferedProtocol):
    """One request at a time. The names of httptools' callbacks are its own."""

    def __init__(self) -> None:
        self.status = FAILED
        self.timing = ""
        self.bytes_in = 0
        self.is_closed = False
        self.is_reusable = False
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._parser = httptools.HttpResponseParser(self)
        self._done: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport | None = None

    async def post(self, head: bytes, body: bytes) -> None:
        """Send and wait for the last byte of the answer. Raises ConnectionError."""
        assert self._transport is not None
        self.bytes_in, self.timing = 0, ""
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self._transport.writelines((head, body))
        await self._done

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        try:
            self._parser.feed_data(self._buffer[:nbytes])
        except httptools.HttpParserError as error:
            self._fail(ConnectionError(f"not HTTP: {error}"))
            self.close()

    def eof_received(self) -> None:
        self._fail(ConnectionResetError("the service hung up"))

    def connection_lost(self, error: Exception | None) -> None:
        self.is_closed = True
        self._fail(ConnectionResetError("the connection was lost"))

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"server-timing":
            self.timing = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self.bytes_in += len(body)

    def on_message_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self.is_reusable = self._parser.should_keep_alive()
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _fail(self, error: ConnectionError) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)


if __name__ == "__main__":
    main()
