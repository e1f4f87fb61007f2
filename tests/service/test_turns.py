"""Turns without any process: a worker here is a name."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import pytest

from service.turns import Turn, Turns


@dataclass
class Named:
    name: str
    is_usable: bool = True


Taking = asyncio.Task["Turn[Named] | None"]


class Desk:
    """Turns among so many workers, and what was taken."""

    def __init__(self, num_workers: int) -> None:
        self.turns: Turns[Named] = Turns(num_workers)
        for index in range(num_workers):
            self.turns.add(Named(f"w{index}"))

    async def take(self, *, is_slow: bool = False) -> Taking:
        task = asyncio.create_task(self.turns.take(is_slow=is_slow))
        await asyncio.sleep(0)
        return task

    async def end(self, taking: Taking) -> None:
        self.turns.end(turn_of(taking))
        await asyncio.sleep(0)


def turn_of(taking: Taking) -> Turn[Named]:
    turn = taking.result()
    assert turn is not None
    return turn


def run(use: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(use(), 20))  # type: ignore[arg-type]


def test_first_come_first_served_by_the_worker_that_was_idle_longest() -> None:
    async def use() -> None:
        desk = Desk(2)
        first, second, third, fourth = [await desk.take() for _ in range(4)]
        assert [turn_of(taking).worker.name for taking in (first, second)] == ["w0", "w1"]
        assert not third.done()
        await desk.end(second)
        assert (turn_of(third).worker.name, fourth.done()) == ("w1", False)
        await desk.end(first)
        assert turn_of(fourth).worker.name == "w0"

    run(use)


@pytest.mark.parametrize("num_workers", [2, 5])
def test_slow_tasks_leave_one_worker_to_the_quick_ones(num_workers: int) -> None:
    async def use() -> None:
        desk = Desk(num_workers)
        slow = [await desk.take(is_slow=True) for _ in range(2 * num_workers)]
        assert [taking.done() for taking in slow] == [index < num_workers - 1 for index in range(2 * num_workers)]
        for _ in range(9):
            quick = await desk.take()
            await desk.end(quick)
        await desk.end(slow[0])
        assert slow[num_workers - 1].done() and not slow[num_workers].done()

    run(use)


def test_slow_and_quick_ones_that_may_begin_do_so_in_the_order_in_which_they_came() -> None:
    async def use() -> None:
        desk = Desk(2)
        busy = [await desk.take() for _ in range(2)]
        slow, quick = await desk.take(is_slow=True), await desk.take()
        await desk.end(busy[0])
        assert (slow.done(), quick.done()) == (True, False)

    run(use)


def test_a_single_worker_does_slow_tasks_too() -> None:
    async def use() -> None:
        desk = Desk(1)
        quick, slow = await desk.take(), await desk.take(is_slow=True)
        await desk.take()
        assert desk.turns.note_slow(turn_of(quick))
        await desk.end(quick)
        assert slow.done()

    run(use)


def test_what_turns_out_slow_takes_a_place_among_them_while_there_is_one() -> None:
    async def use() -> None:
        desk = Desk(3)
        surprises = [await desk.take() for _ in range(3)]
        assert all(desk.turns.note_slow(turn_of(taking)) for taking in surprises)  # nobody waits
        waiting, slow = await desk.take(), await desk.take(is_slow=True)
        assert [desk.turns.note_slow(turn_of(taking)) for taking in surprises] == [True, True, False]
        await desk.end(surprises[2])
        assert (waiting.done(), slow.done()) == (True, False)
        await desk.end(surprises[0])
        assert slow.done()

    run(use)


def test_who_gives_up_waiting_loses_no_turn() -> None:
    async def use() -> None:
        desk = Desk(1)
        busy, gone, next_one = [await desk.take() for _ in range(3)]
        gone.cancel()
        await desk.end(busy)
        assert next_one.done()
        late, last = await desk.take(), await desk.take()
        desk.turns.end(turn_of(next_one))  # and at the same moment
        late.cancel()
        await asyncio.wait([late])
        await asyncio.sleep(0)
        assert late.cancelled() and last.done()

    run(use)


def test_a_worker_that_cannot_be_used_gets_no_task() -> None:
    async def use() -> None:
        desk = Desk(1)
        busy, waiting = await desk.take(), await desk.take()
        turn_of(busy).worker.is_usable = False
        await desk.end(busy)
        assert not waiting.done()
        desk.turns.add(Named("another"))
        await asyncio.sleep(0)
        assert turn_of(waiting).worker.name == "another"

    run(use)


def test_closed_turns_are_none_for_who_waits_and_who_comes() -> None:
    async def use() -> None:
        desk = Desk(1)
        await desk.take()
        waiting = [await desk.take(is_slow=is_slow) for is_slow in (False, True)]
        desk.turns.close()
        assert [await taking for taking in waiting] == [None, None]
        assert await desk.turns.take(is_slow=False) is None

    run(use)
