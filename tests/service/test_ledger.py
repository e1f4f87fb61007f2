"""Accepted requests balance, whatever ends them, and nothing is taken once the ledger is closed."""

import asyncio

import pytest

from service.errors import NotReady
from service.ledger import Ledger


async def request_of(ledger: Ledger, until: asyncio.Future[str]) -> str:
    with ledger.accept():
        return await until


async def started(ledger: Ledger) -> tuple[asyncio.Task[str], asyncio.Future[str]]:
    until: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(request_of(ledger, until))
    await asyncio.sleep(0)
    return task, until


def counts(ledger: Ledger) -> tuple[int, int, int, int]:
    found = ledger.counts
    return found.accepted, found.answered, found.client_gone, found.in_flight


def test_every_accepted_request_is_answered_or_its_client_has_gone() -> None:
    async def run() -> None:
        ledger = Ledger()
        (answered, good), (failed, bad), (gone, _) = [await started(ledger) for _ in range(3)]
        assert counts(ledger) == (3, 0, 0, 3)
        good.set_result("tokens")
        bad.set_exception(ValueError("its own error"))
        gone.cancel()
        results = await asyncio.gather(answered, failed, gone, return_exceptions=True)
        assert [type(result) for result in results] == [str, ValueError, asyncio.CancelledError]
        assert counts(ledger) == (3, 2, 1, 0)

    asyncio.run(run())


def test_what_is_abandoned_is_answered_and_not_counted_as_gone() -> None:
    async def run() -> None:
        ledger = Ledger()
        task, _ = await started(ledger)
        ledger.abandon()
        with pytest.raises(NotReady, match="stopping"):
            await task
        assert counts(ledger) == (1, 1, 0, 0)
        assert ledger.is_closed

    asyncio.run(run())


def test_a_request_that_is_still_read_is_refused_when_the_ledger_closes() -> None:
    async def read(ledger: Ledger) -> None:
        async with ledger.taking():
            await asyncio.sleep(60)

    async def run() -> None:
        ledger = Ledger()
        reading = asyncio.create_task(read(ledger))
        await asyncio.sleep(0)
        ledger.close()
        with pytest.raises(NotReady):
            await reading
        assert counts(ledger) == (0, 0, 0, 0)

    asyncio.run(run())


def test_a_timeout_of_the_request_itself_stays_one() -> None:
    async def run() -> None:
        with pytest.raises(TimeoutError):
            async with Ledger().taking():
                raise TimeoutError

    asyncio.run(run())


def test_drained_waits_for_what_is_in_flight_and_no_longer_than_told() -> None:
    async def run() -> None:
        ledger = Ledger()
        await ledger.drained(60)  # nothing is in flight
        task, until = await started(ledger)
        await ledger.drained(0.01)
        assert not task.done()
        waiting = asyncio.create_task(ledger.drained(60))
        await asyncio.sleep(0)
        until.set_result("tokens")
        await waiting
        assert await task == "tokens"

    asyncio.run(run())
