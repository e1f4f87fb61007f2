"""Waiting for the first of several things, for what would hold up the event loop, and for what may never end."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")

SHORT_BYTES = 2**16  # to hash, copy or write out so many takes less time than to hand it to a thread


async def first_of(*work: Awaitable[object]) -> None:
    """Until one of them is done; the others are cancelled, and have ended too."""
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def within(timeout_s: float, work: Callable[[], Result]) -> Result:
    """What it gives or raises, from a thread that is left behind where it hangs. Raises TimeoutError then.

    Signals are heard meanwhile, which a call that hangs in the kernel would not let through.
    """
    outcome = _in_thread(work)
    try:
        return outcome.result(timeout_s)
    except TimeoutError:
        if outcome.done():
            raise  # its own
        raise TimeoutError(_no_answer(timeout_s)) from None


async def off_loop(work: Callable[[], Result], *, num_bytes: int) -> Result:
    """What `work` on so many bytes gives or raises: made in a thread, unless it is done sooner here and now."""
    return work() if num_bytes <= SHORT_BYTES else await asyncio.to_thread(work)


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
            raise TimeoutError(_no_answer(self._timeout_s)) from error

    def _start(self, work: Callable[[], Result]) -> Future[Result]:
        loop = asyncio.get_running_loop()
        outcome = _in_thread(work)
        self._idle.clear()

        def note_end(_: Future[Result]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._idle.set)

        outcome.add_done_callback(note_end)
        return outcome


def _in_thread(work: Callable[[], Result]) -> Future[Result]:
    """Raises RuntimeError where no more threads are allowed."""
    outcome: Future[Result] = Future()
    outcome.set_running_or_notify_cancel()  # who gives up waiting cannot cancel it

    def call() -> None:
        try:
            outcome.set_result(work())
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            outcome.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return outcome


def _no_answer(timeout_s: float) -> str:
    return f"no answer within {timeout_s:g} s"
