"""Waiting for the first of several things, and for what may never end."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


async def first_of(*work: Awaitable[object]) -> None:
    """Until one of them is done; the others are cancelled, and have ended too."""
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class DaemonThread:
    """Calls what may hang, one at a time: nobody waits longer than `timeout_s`, and the process's end not at all."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._idle = asyncio.Event()
        self._idle.set()

    async def run(self, work: Callable[[], Result]) -> Result:
        """What it gives or raises. Raises TimeoutError, also where an earlier one still hangs."""
        try:
            async with asyncio.timeout(self._timeout_s):
                while not self._idle.is_set():  # another one that waited may have been quicker
                    await self._idle.wait()
                return await asyncio.wrap_future(self._start(work))
        except TimeoutError as error:
            raise TimeoutError(f"no answer within {self._timeout_s:g} s") from error

    def _start(self, work: Callable[[], Result]) -> Future[Result]:
        loop = asyncio.get_running_loop()
        outcome: Future[Result] = Future()
        outcome.set_running_or_notify_cancel()  # who gives up waiting cannot cancel it

        def call() -> None:
            try:
                outcome.set_result(work())
            except Exception as error:  # noqa: BLE001 - raised where it is waited for
                outcome.set_exception(error)
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._idle.set)

        threading.Thread(target=call, daemon=True).start()  # raises RuntimeError where no more are allowed
        self._idle.clear()
        return outcome
