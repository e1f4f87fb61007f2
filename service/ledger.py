"""Which requests are in flight. Each accepted one is answered once, or its client has gone: nothing is lost.

    taking (its body is read) -> accepted -> answered, or its client gone

Once the ledger is closed, nothing new is taken. Called by service/engine.py.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

from service.errors import NotReady


@dataclass(slots=True)
class RequestCounts:
    """Requests since the start."""

    accepted: int = 0
    answered: int = 0
    client_gone: int = 0

    @property
    def in_flight(self) -> int:
        """Accepted and neither answered nor gone."""
        return self.accepted - self.answered - self.client_gone


class Ledger:
    """One per process. `counts` must balance at all times."""

    def __init__(self) -> None:
        self.counts = RequestCounts()
        self.is_closed = False
        self._is_abandoned = False
        self._taking: set[asyncio.Timeout] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @contextlib.asynccontextmanager
    async def taking(self) -> AsyncIterator[None]:
        """While a request is read, which is not accepted before it is whole.

        Raises NotReady in the middle of the block, as soon as the ledger is closed.
        """
        until_closed = asyncio.timeout(None)
        try:
            async with until_closed:
                self._taking.add(until_closed)
                yield
        except TimeoutError:
            if not until_closed.expired():
                raise
            raise stopping() from None
        finally:
            self._taking.discard(until_closed)

    @contextlib.contextmanager
    def accept(self) -> Iterator[None]:
        """The current task's request, from acceptance to its answer. Raises NotReady when it is abandoned."""
        task = asyncio.current_task()
        assert task is not None
        self.counts.accepted += 1
        self._tasks.add(task)
        self._idle.clear()
        is_gone = False
        try:
            yield
        except asyncio.CancelledError:
            if self._is_abandoned:
                raise stopping() from None
            is_gone = True
            raise
        finally:
            self.counts.client_gone += is_gone
            self.counts.answered += not is_gone
            self._tasks.discard(task)
            if self.counts.in_flight == 0:
                self._idle.set()

    def close(self) -> None:
        """Take nothing new: what is still read is refused now."""
        self.is_closed = True
        while self._taking:
            self._taking.pop().reschedule(0)

    def abandon(self) -> None:
        """Answer what is in flight with NotReady."""
        self._is_abandoned = True
        self.close()
        for task in list(self._tasks):
            task.cancel()

    async def drained(self, timeout_s: float) -> None:
        """Return when nothing is in flight, or after so long."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)


def stopping() -> NotReady:
    """What every request gets that comes too late, or is not finished in time."""
    return NotReady("the service is stopping")
