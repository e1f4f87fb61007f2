"""How far the ranks are with reading their weights: a bar on a terminal, a log line each quarter elsewhere."""

import logging
import sys

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from tp import wire

log = logging.getLogger("tpvision.load")

_LOGGED_STEPS = 4


class LoadProgress:
    """Shows the slowest view of all ranks: the sum of their bytes."""

    def __init__(self) -> None:
        self._ranks: dict[tuple[int, int], wire.Progress] = {}
        self._logged = 0
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def update(self, group: int, rank: int, progress: wire.Progress) -> None:
        """One rank has read more."""
        self._ranks[group, rank] = progress
        loaded = sum(item.loaded_bytes for item in self._ranks.values())
        total = sum(item.total_bytes for item in self._ranks.values())
        if sys.stderr.isatty():
            self._draw(loaded, total)
        else:
            self._log(loaded, total)

    def _draw(self, loaded: int, total: int) -> None:
        if self._bar is None:
            self._bar = Progress(
                TextColumn("loading weights"),
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._bar.add_task("", total=total)
            self._bar.start()
        assert self._task is not None
        self._bar.update(self._task, completed=loaded, total=total)
        if loaded >= total:
            self._bar.stop()
            self._bar, self._ranks = None, {}

    def _log(self, loaded: int, total: int) -> None:
        step = loaded * _LOGGED_STEPS // max(total, 1)
        if step != self._logged:
            self._logged = step
            log.info("weights: %d of %d bytes read", loaded, total)
