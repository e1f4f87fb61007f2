"""What is long does not hold up the event loop; nobody waits for what may never end, nor does the process's end."""

import asyncio
import subprocess
import sys
import threading
import time

import pytest
from running import ROOT

from service.waiting import DaemonThread, off_loop, within


@pytest.mark.parametrize(("num_bytes", "is_here"), [(0, True), (2**16, True), (2**16 + 1, False)])
def test_only_what_is_long_goes_to_a_thread(num_bytes: int, is_here: bool) -> None:
    thread = asyncio.run(off_loop(threading.current_thread, num_bytes=num_bytes))
    assert (thread is threading.current_thread()) == is_here


def test_it_raises_what_the_work_does() -> None:
    for num_bytes in (0, 2**20):
        with pytest.raises(ZeroDivisionError):
            asyncio.run(off_loop(lambda: 1 // 0, num_bytes=num_bytes))


def test_it_gives_and_raises_what_the_work_does() -> None:
    async def check() -> None:
        thread = DaemonThread(5)
        assert await thread.run(lambda: 7) == 7
        with pytest.raises(ZeroDivisionError):
            await thread.run(lambda: 1 // 0)
        assert await thread.run(threading.current_thread) is not threading.main_thread()

    asyncio.run(check())


def test_while_one_hangs_no_other_is_started() -> None:
    end = threading.Event()
    started: list[int] = []

    def hang() -> None:
        started.append(1)
        end.wait()

    async def check() -> None:
        thread = DaemonThread(0.05)
        for _ in range(3):
            with pytest.raises(TimeoutError, match=r"no answer within 0\.05 s"):
                await thread.run(hang)
        assert started == [1]
        end.set()
        assert await thread.run(lambda: "again") == "again"

    asyncio.run(check())


def test_without_room_for_a_thread_it_says_so_and_the_next_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        thread = DaemonThread(0.5)
        with monkeypatch.context() as full:
            full.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                await thread.run(lambda: 7)
        assert await thread.run(lambda: 7) == 7

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    asyncio.run(check())


def test_of_many_that_wait_one_runs_at_a_time() -> None:
    running: list[int] = []

    def work() -> int:
        running.append(1)
        time.sleep(0.01)
        most = len(running)
        running.pop()
        return most

    async def check() -> None:
        thread = DaemonThread(20)
        assert await asyncio.gather(*(thread.run(work) for _ in range(8))) == [1] * 8

    asyncio.run(check())


@pytest.mark.parametrize(
    "wait", ["await thread.run(hang)", "asyncio.create_task(thread.run(hang)); await asyncio.sleep(0.05)"]
)
def test_the_process_ends_while_it_hangs(wait: str) -> None:
    program = f"""
import asyncio, threading
from service.waiting import DaemonThread
async def main():
    thread, hang = DaemonThread(0.1), threading.Event().wait
    try:
        {wait}
    except TimeoutError:
        pass
asyncio.run(main())
"""
    command = [sys.executable, "-W", "error", "-c", program]
    ended = subprocess.run(command, cwd=ROOT, timeout=20, capture_output=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_within_gives_or_raises_what_the_call_does() -> None:
    assert within(20, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        within(20, lambda: 1 // 0)
    with pytest.raises(TimeoutError, match="its own"):
        within(20, lambda: raise_(TimeoutError("its own")))


def test_within_leaves_behind_what_hangs() -> None:
    end = threading.Event()
    with pytest.raises(TimeoutError, match="no answer within"):
        within(0.05, end.wait)
    end.set()


def raise_(error: Exception) -> None:
    raise error
