"""How far a long download or copy is: a bar on a terminal, a log line each quarter elsewhere."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

log = logging.getLogger("tpvision.files")

Report = Callable[[int, int], None]  # bytes done, bytes in all

_LOGGED_STEPS = 4


@contextmanager
def shown(what: str) -> Iterator[Report]:
    """A report to call as often as wanted, drawn while the context lasts."""
    if not sys.stderr.isatty():
        yield _logged(what)
        return
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _logged(what: str) -> Report:
    logged = 0

    def report(done: int, total: int) -> None:
        nonlocal logged
        step = done * _LOGGED_STEPS // max(total, 1)
        if step > logged:
            logged = step
            log.info("%s: %s of %s bytes", what, f"{done:,}", f"{total:,}")

    return report
