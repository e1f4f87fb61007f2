"""CPU that processes use, by the kernel's accounts, and whether others disturbed a measurement."""

import ctypes
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

MAX_OTHERS_SHARE = 0.05  # of the machine; a run in which others used more is repeated,
MAX_REPEATS = 3  # so many times, and then marked

Result = TypeVar("Result")

_LIBC = ctypes.CDLL(None)
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_BUSY = (0, 1, 2, 5, 6, 7)  # columns of /proc/stat: user, nice, system, irq, softirq, steal


def cpu_s(pids: Iterable[int]) -> float:
    """Seconds of CPU that these processes, all their threads, have used; those that are gone do not count."""
    return sum(map(_cpu_s, pids))


def family(root: int) -> list[int]:
    """A living process and all below it."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()  # the name before it may hold anything
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


class CpuWatch:
    """What others take of the machine's CPU from now on: all that it is busy with, but for this process and its own."""

    def __init__(self) -> None:
        self._started = time.monotonic(), _machine_s(), _own_s()

    def others_share(self) -> float:
        """Their share of all cores since the start, 0 to 1; time that a hypervisor gave to others counts."""
        started_s, machine_s, own_s = self._started
        elapsed_s = time.monotonic() - started_s
        others_s = _machine_s() - machine_s - (_own_s() - own_s)
        return max(0.0, others_s) / (elapsed_s * (os.cpu_count() or 1))


@dataclass(frozen=True, slots=True)
class Watched(Generic[Result]):
    """A result, and how quiet the machine was."""

    result: Result
    others_share: float
    num_runs: int = 1

    @property
    def is_disturbed(self) -> bool:
        """Whether others used too much CPU in this, the quietest, run."""
        return self.others_share > MAX_OTHERS_SHARE


def undisturbed(
    run: Callable[[], Result], watch: Callable[[], CpuWatch] = CpuWatch, *, max_repeats: int = MAX_REPEATS
) -> Watched[Result]:
    """The result of `run`, repeated while others disturb it; if they never stop, that of the least disturbed run."""
    runs: list[Watched[Result]] = []
    while not runs or (runs[-1].is_disturbed and len(runs) <= max_repeats):
        watching = watch()
        result = run()
        runs.append(Watched(result, watching.others_share(), len(runs) + 1))
    best = min(runs, key=lambda watched: watched.others_share)
    return Watched(best.result, best.others_share, len(runs))


def worst(runs: Iterable[Watched[Any]]) -> Watched[Any]:
    """The most disturbed of several."""
    return max(runs, key=lambda watched: watched.others_share)


def _own_s() -> float:
    """CPU of this process, of all that live below it, and of children that it has collected."""
    times = os.times()
    return cpu_s(family(os.getpid())) + times.children_user + times.children_system


def _cpu_s(pid: int) -> float:
    clock = ctypes.c_int()
    if _LIBC.clock_getcpuclockid(pid, ctypes.byref(clock)) != 0:
        return 0.0
    try:
        return time.clock_gettime(clock.value)
    except OSError:
        return 0.0


def _machine_s() -> float:
    columns = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    return sum(int(columns[index]) for index in _BUSY) * _TICK_S
