"""An open-loop load: requests leave when they are due, however long the answers take. Bounded in time and count."""

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx

LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=64)


@dataclass(slots=True)
class Outcome:
    """What became of one request; seconds."""

    status: int
    started_s: float
    latency_s: float
    retry_after_s: float | None = None
    code: str | None = None


@dataclass(slots=True)
class Probes:
    """Latencies of a probe route, polled while something else goes on."""

    latencies_s: list[float] = field(default_factory=list)

    @property
    def p99_s(self) -> float:
        return quantile(self.latencies_s, 0.99)

    @property
    def max_s(self) -> float:
        return max(self.latencies_s)


def quantile(values: Sequence[float], share: float) -> float:
    """The value that `share` of them do not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def send(client: httpx.AsyncClient, content: bytes) -> Outcome:
    """One POST /v1/encode; a connection that fails counts as status 0."""
    started = time.monotonic()
    try:
        answer = await client.post("/v1/encode", content=content)
    except httpx.TransportError as error:
        return Outcome(0, started, time.monotonic() - started, code=type(error).__name__)
    retry_after = answer.headers.get("retry-after")
    code = answer.json()["error"]["code"] if answer.status_code != 200 else None
    latency_s = time.monotonic() - started
    return Outcome(answer.status_code, started, latency_s, float(retry_after) if retry_after else None, code)


async def closed_loop(client: httpx.AsyncClient, content: bytes, *, clients: int, seconds: float) -> float:
    """Answers a second with so many clients that each wait for theirs."""
    deadline = time.monotonic() + seconds
    num_done = 0

    async def one() -> None:
        nonlocal num_done
        while time.monotonic() < deadline:
            outcome = await send(client, content)
            assert outcome.status == 200, outcome
            num_done += 1

    started = time.monotonic()
    await asyncio.gather(*(one() for _ in range(clients)))
    return num_done / (time.monotonic() - started)


async def open_loop(
    client: httpx.AsyncClient, content: bytes, *, rate: float, seconds: float, returns: bool = False
) -> tuple[list[Outcome], list[Outcome]]:
    """Outcomes of `rate` requests a second, and, with `returns`, of one more try of each that was refused."""

    async def one(due: float) -> tuple[Outcome, Outcome | None]:
        await asyncio.sleep(due - time.monotonic())
        first = await send(client, content)
        if not returns or first.status != 429 or first.retry_after_s is None:
            return first, None
        await asyncio.sleep(first.retry_after_s)
        return first, await send(client, content)

    started = time.monotonic()
    pairs = await asyncio.gather(*(one(started + index / rate) for index in range(int(rate * seconds))))
    return [first for first, _ in pairs], [second for _, second in pairs if second is not None]


async def probe(url: str, path: str, stop: asyncio.Event, *, every_s: float = 0.05) -> Probes:
    """Poll a route over one connection until told to stop."""
    probes = Probes()
    async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as client:
        while not stop.is_set():
            started = time.monotonic()
            answer = await client.get(path)
            probes.latencies_s.append(time.monotonic() - started)
            assert answer.status_code == 200
            await asyncio.sleep(every_s)
    return probes


def summary(outcomes: Sequence[Outcome]) -> str:
    """One line for a person."""
    by_status = {status: sum(o.status == status for o in outcomes) for status in sorted({o.status for o in outcomes})}
    good = [outcome.latency_s for outcome in outcomes if outcome.status == 200]
    if not good:
        return f"{by_status}"
    return (
        f"{by_status}, latency of 200s p50 {statistics.median(good):.2f} s, p99 {quantile(good, 0.99):.2f} s, "
        f"max {max(good):.2f} s"
    )
