"""Whose task a worker takes next: first come, first served, but slow tasks leave one worker to the quick ones.

A task is slow by what is said of it before, or by what it turns out to be. A slow one begins only while one worker more
than that is not at work on such. One that turns out slow is counted as such where there is room; where there is none
and a quick one waits, its owner is told to end it, and to begin it again as slow. `service.decoders` is that owner.
"""

import asyncio
import itertools
from collections import deque
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Worker(Protocol):
    """Whoever does one task at a time."""

    @property
    def is_usable(self) -> bool:
        """Whether it can still be given one."""


AnyWorker = TypeVar("AnyWorker", bound=Worker)


@dataclass(slots=True, eq=False)
class Turn(Generic[AnyWorker]):
    """A worker, for one task."""

    worker: AnyWorker
    is_slow: bool


_Lane = deque[tuple[int, asyncio.Future[Turn[AnyWorker] | None]]]


class Turns(Generic[AnyWorker]):
    """The idle workers, and the tasks that wait for one. Used on one loop."""

    def __init__(self, num_workers: int) -> None:
        self._max_slow = max(1, num_workers - 1)
        self._num_slow = 0
        self._idle: deque[AnyWorker] = deque()
        self._numbers = itertools.count()  # of the tasks, in the order in which they came
        self._quick: _Lane[AnyWorker] = deque()
        self._slow: _Lane[AnyWorker] = deque()
        self._is_closed = False

    def add(self, worker: AnyWorker) -> None:
        """One more, which is idle."""
        self._idle.append(worker)
        self._hand_out()

    async def take(self, *, is_slow: bool) -> Turn[AnyWorker] | None:
        """The worker that has been idle longest, when it is this task's turn; `end` must follow. None: closed."""
        if self._is_closed:
            return None
        waiting: asyncio.Future[Turn[AnyWorker] | None] = asyncio.get_running_loop().create_future()
        (self._slow if is_slow else self._quick).append((next(self._numbers), waiting))
        self._hand_out()
        try:
            return await waiting
        except asyncio.CancelledError:
            turn = None if waiting.cancelled() else waiting.result()
            if turn is not None:  # it came at the same moment
                self.end(turn)
            raise

    def end(self, turn: Turn[AnyWorker]) -> None:
        """The task is done; its worker is idle, unless it can be used no more."""
        self._num_slow -= turn.is_slow
        self._idle.append(turn.worker)
        self._hand_out()

    def note_slow(self, turn: Turn[AnyWorker]) -> bool:
        """A quick task turns out slow: whether it may go on, be it because nobody needs its worker now."""
        if self._num_slow < self._max_slow:
            self._num_slow += 1
            turn.is_slow = True
        return turn.is_slow or _first(self._quick) is None

    def close(self) -> None:
        """No more turns, neither for those who wait."""
        self._is_closed = True
        for lane in (self._quick, self._slow):
            while (first := _first(lane)) is not None:
                first[1].set_result(None)

    def _hand_out(self) -> None:
        while self._idle:
            if not self._idle[0].is_usable:
                self._idle.popleft()  # somebody adds another
                continue
            lanes = [self._quick, self._slow] if self._num_slow < self._max_slow else [self._quick]
            lane = min((lane for lane in lanes if _first(lane)), key=lambda lane: lane[0][0], default=None)
            if lane is None:
                return
            is_slow = lane is self._slow
            self._num_slow += is_slow
            lane.popleft()[1].set_result(Turn(self._idle.popleft(), is_slow))


def _first(lane: _Lane[AnyWorker]) -> tuple[int, asyncio.Future[Turn[AnyWorker] | None]] | None:
    """Of those who still wait; what is before it is dropped."""
    while lane and lane[0][1].done():
        lane.popleft()
    return lane[0] if lane else None
