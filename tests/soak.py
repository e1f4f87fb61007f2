"""A soak: mixed sizes and forms, disconnects, bad files and one rank kill, against a service that it starts itself.

`python tests/soak.py [--minutes 3]` prints balances, memory over time and a latency table, and exits non-zero if a
promise was broken. Bounded: it ends by itself.
"""

import argparse
import asyncio
import os
import random
import signal
import sys
import time
from dataclasses import dataclass, field

import httpx
import load
from make_photograph import acceptance_picture
from rich.console import Console
from rich.table import Table
from running import DATA, GOLDEN, RunningService, assert_balanced, ranks_of, resident_bytes

FORMS = ("application/vnd.safetensors", "application/octet-stream", "application/x-npy", "application/json")
SIZES = ((28, 28), (224, 224), (448, 448), (640, 480), (1280, 720))
CLIENTS = 8


@dataclass(slots=True)
class Soak:
    """What was sent and what came back."""

    latencies_s: dict[str, list[float]] = field(default_factory=dict)
    statuses: dict[int, int] = field(default_factory=dict)
    num_left: int = 0
    memory: list[tuple[float, int]] = field(default_factory=list)

    def note(self, kind: str, status: int, latency_s: float) -> None:
        self.statuses[status] = self.statuses.get(status, 0) + 1
        if status == 200:
            self.latencies_s.setdefault(kind, []).append(latency_s)


async def client(soak: Soak, url: str, deadline: float, seed: int) -> None:
    """One client: a random request after the other."""
    choose = random.Random(seed)
    pictures = {size: acceptance_picture(*size) for size in SIZES}
    bad = [path.read_bytes() for path in sorted((DATA / "nasty").glob("*")) if path.stat().st_size < 200_000]
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:
        while time.monotonic() < deadline:
            kind = choose.choices(["good", "bad", "leave"], [8, 2, 1])[0]
            size = choose.choice(SIZES)
            content = choose.choice(bad) if kind == "bad" else pictures[size]
            headers = {"accept": choose.choice(FORMS)}
            timeout = httpx.Timeout(60, read=0.02) if kind == "leave" else httpx.Timeout(60)
            started = time.monotonic()
            try:
                answer = await http.post("/v1/encode", content=content, headers=headers, timeout=timeout)
            except httpx.TimeoutException:
                soak.num_left += 1
                continue
            name = f"{size[0]}x{size[1]}" if kind == "good" else kind
            soak.note(name, answer.status_code, time.monotonic() - started)
            if answer.status_code in (429, 503):
                await asyncio.sleep(float(answer.headers["retry-after"]))


async def watch(soak: Soak, service: RunningService, deadline: float) -> None:
    """Memory every second, and one rank killed halfway."""
    started = time.monotonic()
    has_killed = False
    while (now := time.monotonic()) < deadline:
        soak.memory.append((now - started, resident_bytes(service.process.pid)))
        if not has_killed and now - started > (deadline - started) / 2:
            os.kill(ranks_of(service)[0], signal.SIGKILL)
            has_killed = True
        await asyncio.sleep(1)


def slope_bytes_a_minute(points: list[tuple[float, int]]) -> float:
    """Least squares over the second half, when everything is warm."""
    points = points[len(points) // 2 :]
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points) or 1.0
    return 60 * sum((x - mean_x) * (y - mean_y) for x, y in points) / spread


def report(soak: Soak, service: RunningService) -> bool:
    """Print what happened; whether every promise was kept."""
    console = Console()
    table = Table("request", "answers", "p50 ms", "p99 ms", "max ms")
    for kind, latencies in sorted(soak.latencies_s.items()):
        shown = [load.quantile(latencies, share) for share in (0.5, 0.99)] + [max(latencies)]
        table.add_row(kind, str(len(latencies)), *(f"{seconds * 1000:.0f}" for seconds in shown))
    console.print(table)
    requests = service.client.get("/v1/capacity").json()["requests"]
    slope = slope_bytes_a_minute(soak.memory)
    console.print(f"statuses {dict(sorted(soak.statuses.items()))}, {soak.num_left} left; {requests}")
    console.print(f"front-end memory {soak.memory[-1][1] / 1e6:.0f} MB, {slope / 1e6:+.2f} MB a minute")
    server_errors = {status for status in soak.statuses if status >= 500 and status != 503}
    return not server_errors and slope < 5e6


async def run(minutes: float) -> bool:
    """The soak, from start to verdict."""
    service = RunningService(
        ["--model", str(GOLDEN / "tiny-k3-f32"), "--tp", "2", "--policy", "downscale"]
    ).wait_ready()
    soak = Soak()
    deadline = time.monotonic() + 60 * minutes
    clients = [client(soak, service.url, deadline, seed) for seed in range(CLIENTS)]
    await asyncio.gather(watch(soak, service, deadline), *clients)
    is_good = report(soak, service)
    assert_balanced(service)
    return service.stop() == 0 and is_good


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=3.0)
    sys.exit(0 if asyncio.run(run(parser.parse_args().minutes)) else 1)
