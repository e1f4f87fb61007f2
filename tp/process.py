"""A process of ours: it ends with its parent, so that a kill leaves nothing behind; its imports; what it holds.

Linux only (prctl(2); /proc, proc(5)). The signal comes when the *thread* that started the process
ends: parents start children from their main thread.
"""

import contextlib
import ctypes
import gc
import os
import signal
import sys
from collections.abc import Container, Iterator
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36

EXIT_ORPHANED = 65
PARENT_VARIABLE = "TP_PARENT_PID"  # how torchrun's own pid reaches the ranks


def die_with_parent(expected_parent: int | None = None) -> None:
    """Ask the kernel for SIGKILL when the parent dies; exit now if it already has.

    `expected_parent` is the parent's pid as it knew it when it started this process; without it, being adopted by
    pid 1 is the only sign of a parent that died first.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if expected_parent is not None and os.getppid() != expected_parent:
        sys.exit(EXIT_ORPHANED)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own one dies. They stay, also when dead, until this process ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """For imports: collections find nothing in them, and take a tenth of their time. Later ones pass modules by."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def reap_orphans(known: Container[int]) -> None:
    """Collect dead children that nobody of ours waits for: as PID 1 we inherit the ranks of a killed torchrun.

    `known` are the pids that have an owner who does.
    """
    while True:
        try:
            dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if dead is None or dead.si_pid in known:  # its owner comes first; the others have time
            return
        os.waitpid(dead.si_pid, os.WNOHANG)


def resident_bytes(pid: int | None = None) -> int:
    """RssAnon + RssShmem of a process (proc(5)), this one by default: what nobody else can be made to pay for."""
    fields = _memory_fields(pid)
    return fields["RssAnon"] + fields["RssShmem"]


def forget_peak(pid: int | None = None) -> None:
    """Let `peak_resident_bytes` count from now on. Raises OSError where the kernel or a container forbids it."""
    Path(f"/proc/{pid or 'self'}/clear_refs").write_text("5")


def peak_resident_bytes(pid: int | None = None) -> int:
    """The most that `resident_bytes` has been, if file mappings were always as large as they are now."""
    fields = _memory_fields(pid)
    return fields["VmHWM"] - fields["RssFile"]


def _memory_fields(pid: int | None) -> dict[str, int]:
    """The sizes of /proc/PID/status, in bytes."""
    lines = Path(f"/proc/{pid or 'self'}/status").read_text().splitlines()
    sizes = (line.split() for line in lines if line.endswith(" kB"))
    return {name.removesuffix(":"): int(kib) * 1024 for name, kib, _ in sizes}
