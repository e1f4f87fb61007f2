"""Signals, which often come to all processes of a command at once, and to some of them more than once."""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator, Mapping
from types import FrameType

_ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def like_ctrl_c() -> None:
    """SIGTERM and SIGHUP raise KeyboardInterrupt too, or do what SIGINT does by then. `nohup` keeps its SIGHUP away."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGHUP])


def watch(actions: Mapping[signal.Signals, Callable[[], object]]) -> None:
    """Call these on the running loop from now on. On the main thread."""
    loop = asyncio.get_running_loop()

    def handler(number: int, _: FrameType | None) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(actions[signal.Signals(number)])

    for number in actions:  # not by the loop, which gives them back their default when it is closed
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGHUP])  # one may have come since the process began


def ignore() -> None:
    """When all is done: one more would end the process as if it had failed."""
    for number in _ENDS:
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """A process that is started in the block gets none before it says so, or for good where it ignores them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
