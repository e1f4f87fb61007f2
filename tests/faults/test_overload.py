"""Three times what it can do: answered or refused at once, in bounded memory and time, and Retry-After is honest."""

import asyncio
from collections.abc import Awaitable, Callable

import httpx
import load
import pytest
from make_photograph import acceptance_picture
from running import GOLDEN, RunningService, assert_balanced, resident_bytes

pytestmark = [pytest.mark.faults, pytest.mark.timeout(500)]

PICTURE = acceptance_picture(448, 448)  # 1,024 patches
MAX_QUEUE_S = 3.0
OVERLOAD = 3


@pytest.fixture(scope="module")
def service(start_module_service: Callable[..., RunningService]) -> RunningService:
    return start_module_service(
        "--model", str(GOLDEN / "tiny-k3-f32"), "--tp", "2", TPVISION_LIMITS__MAX_QUEUE_S=str(MAX_QUEUE_S)
    )


@pytest.fixture(scope="module")
def start_module_service(start_service: Callable[..., RunningService]) -> Callable[..., RunningService]:
    return start_service


def run_load(service: RunningService, work: Callable[[httpx.AsyncClient, float], Awaitable[None]]) -> None:
    async def run() -> None:
        async with httpx.AsyncClient(base_url=service.url, timeout=60, trust_env=False, limits=load.LIMITS) as client:
            rate = await load.closed_loop(client, PICTURE, clients=8, seconds=4)
            await work(client, rate)

    asyncio.run(run())
    assert_balanced(service)


def test_sixty_seconds_of_three_times_too_much(service: RunningService) -> None:
    async def work(client: httpx.AsyncClient, rate: float) -> None:
        stop = asyncio.Event()
        probing = asyncio.create_task(load.probe(service.url, "/livez", stop))
        before, _ = await load.open_loop(client, PICTURE, rate=OVERLOAD * rate, seconds=15)
        early = resident_bytes(service.process.pid)
        after, _ = await load.open_loop(client, PICTURE, rate=OVERLOAD * rate, seconds=45)
        late = resident_bytes(service.process.pid)
        stop.set()
        probes = await probing
        outcomes = before + after
        print(
            f"\ncapacity {rate:.1f}/s, offered {OVERLOAD * rate:.1f}/s: {load.summary(outcomes)}; "
            f"/livez p99 {probes.p99_s * 1000:.0f} ms, max {probes.max_s * 1000:.0f} ms; "
            f"front-end memory {early / 1e6:.0f} MB after 15 s, {late / 1e6:.0f} MB after 60 s"
        )
        assert {outcome.status for outcome in outcomes} == {200, 429}
        assert all(outcome.retry_after_s for outcome in outcomes if outcome.status == 429)
        assert {outcome.code for outcome in outcomes if outcome.status == 429} == {"overloaded"}
        batch_s = 16 / rate  # of the top tier, 16,384 patches
        good = [outcome.latency_s for outcome in outcomes if outcome.status == 200]
        assert load.quantile(good, 0.99) < MAX_QUEUE_S + batch_s + 2
        assert late - early < 50e6
        assert probes.p99_s < 0.1
        assert probes.max_s < 1

    run_load(service, work)


@pytest.mark.slow  # the last ones are told to return minutes later
def test_refused_clients_that_return_when_told_get_in(service: RunningService) -> None:
    async def work(client: httpx.AsyncClient, rate: float) -> None:
        first, second = await load.open_loop(client, PICTURE, rate=OVERLOAD * rate, seconds=20, returns=True)
        returned = sum(outcome.status == 200 for outcome in second) / len(second)
        print(f"\nfirst {load.summary(first)}; of {len(second)} that returned {returned:.0%} got in")
        assert returned >= 0.9

    run_load(service, work)
