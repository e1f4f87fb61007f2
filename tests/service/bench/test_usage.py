"""CPU by the kernel's accounts, and runs that are repeated while others disturb them."""

import os
import subprocess
import sys
import time

import pytest
from running import ROOT

from service.bench import usage
from service.bench.usage import CpuWatch, Watched, cpu_s, family, undisturbed, worst

BURN = "import time\nwhile time.process_time() < {seconds}: pass\n"


class FakeWatch(CpuWatch):
    """Others that take what a test says."""

    def __init__(self, share: float) -> None:
        self._share = share

    def others_share(self) -> float:
        return self._share


@pytest.mark.parametrize(
    ("shares", "result", "num_runs", "is_disturbed"),
    [
        ([0.05], 1, 1, False),
        ([0.2, 0.01], 2, 2, False),
        ([0.2, 0.3, 0.06, 0.04], 4, 4, False),
        ([0.2, 0.06, 0.3, 0.4, 0.0], 2, 4, True),  # three repeats and no more; the least disturbed counts
    ],
)
def test_a_disturbed_run_is_repeated_three_times_and_then_marked(
    shares: list[float], result: int, num_runs: int, is_disturbed: bool
) -> None:
    watches = iter(map(FakeWatch, shares))
    runs = iter(range(1, 10))
    watched = undisturbed(lambda: next(runs), lambda: next(watches))
    assert (watched.result, watched.num_runs, watched.is_disturbed) == (result, num_runs, is_disturbed)
    assert watched.others_share == shares[result - 1]


def test_a_run_that_takes_too_long_to_be_repeated_is_marked_at_once() -> None:
    watched = undisturbed(lambda: 1, lambda: FakeWatch(0.2), max_repeats=0)
    assert (watched.num_runs, watched.is_disturbed) == (1, True)


def test_the_worst_of_several_runs_is_the_most_disturbed() -> None:
    runs = [Watched("a", 0.01), Watched("b", 0.3), Watched("c", 0.0)]
    assert (worst(runs).result, worst(runs).is_disturbed) == ("b", True)


def test_family_is_a_process_and_all_below_it() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as child:
        deadline = time.monotonic() + 20
        while len(family(child.pid)) < 2:
            assert time.monotonic() < deadline
        assert family(child.pid)[0] == child.pid
        assert set(family(child.pid)) < set(family(os.getpid()))
        child.communicate(b"\n")


def test_cpu_of_a_living_process_is_its_clock() -> None:
    code = BURN.format(seconds=0.3) + "print('burnt', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert 0.3 <= cpu_s([child.pid]) < 2
        child.communicate(b"\n")
    assert cpu_s([child.pid]) == 0


def test_what_our_own_processes_use_is_not_others(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_s = [100.0]
    monkeypatch.setattr(usage, "_machine_s", lambda: machine_s[0])
    watch = CpuWatch()
    before_s = usage._own_s()
    subprocess.run([sys.executable, "-c", BURN.format(seconds=0.3)], check=True)  # collected: gone from /proc
    own_s = usage._own_s() - before_s
    assert own_s >= 0.3
    machine_s[0] += own_s
    assert watch.others_share() < 0.01
    machine_s[0] += 1
    started_s = watch._started[0]
    share = watch.others_share()
    assert share == pytest.approx(1 / ((time.monotonic() - started_s) * (os.cpu_count() or 1)), rel=0.1)


ADOPTING = """
import os, subprocess, sys, time
from pathlib import Path
from service.bench.usage import cpu_s, family
from tp.process import adopt_orphans

adopt_orphans()
orphan = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {sys.argv[1]!r}]).pid)"
pid = int(subprocess.run([sys.executable, "-c", orphan], stdout=subprocess.PIPE, check=True).stdout)
while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
    time.sleep(0.02)
print(cpu_s([pid]) if pid in family(os.getpid()) else "lost")
"""


def test_what_an_orphan_used_is_known_when_it_is_dead() -> None:
    command = [sys.executable, "-c", ADOPTING, BURN.format(seconds=0.3)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert 0.3 <= float(ended.stdout) < 2


def test_the_machines_clock_runs() -> None:
    before_s = usage._machine_s()
    subprocess.run([sys.executable, "-c", BURN.format(seconds=0.3)], check=True)
    assert usage._machine_s() - before_s >= 0.2
