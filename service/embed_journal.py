"""What `tpvision embed` has finished, in an SQLite file beside its output, so that a run that was ended goes on.

An image is in it from the moment its answer is there, also when the process is killed then. It is not the output: that
is written from it at the end (`service.embed_output`), in the order of names, whatever the order of answers was.
"""

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

_SCHEMA = """
CREATE TABLE IF NOT EXISTS run (only INTEGER PRIMARY KEY CHECK (only = 0), about TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS image (
    name TEXT PRIMARY KEY, version TEXT NOT NULL, sha256 TEXT, about TEXT NOT NULL, num_rows INTEGER NOT NULL,
    data BLOB NOT NULL
);
"""


class JournalError(ValueError):
    """The journal belongs to another run, another process is using it, or the disk is full."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One image: its geometry, or the error in its place (`code`, `message`). Its `num_rows` vectors lie apart."""

    name: str
    version: str
    sha256: str | None
    about: Mapping[str, Any]
    num_rows: int
    num_bytes: int

    @property
    def is_error(self) -> bool:
        """Whether there is no embedding."""
        return "code" in self.about


class Journal:
    """Open for one process at a time, and for any thread, one at a time: closing it under another one is a crash."""

    def __init__(self, path: Path, run: Mapping[str, Any]) -> None:
        """Open or make it for a run that `run` describes. Raises JournalError when it has begun as another one."""
        self.path = path
        self._database = sqlite3.connect(path, isolation_level=None, timeout=0, check_same_thread=False)
        try:
            self._database.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.executescript(_SCHEMA)
            self._database.execute("INSERT OR IGNORE INTO run VALUES (0, ?)", (json.dumps(run),))
            begun = json.loads(self._database.execute("SELECT about FROM run").fetchone()[0])
        except sqlite3.Error as error:
            self._database.close()
            raise JournalError(f"{path} cannot be used ({error}); is another run writing it?") from error
        if begun != run:
            self._database.close()
            names = [name for name in run if begun.get(name) != run[name]]
            was = ", ".join(f"{name} was {begun.get(name)} and is {run[name]}" for name in names)
            raise JournalError(f"{path} is of another run: {was}. Remove it to begin anew")

    def add(self, entry: Entry, data: bytes | memoryview) -> None:
        """An image is finished; one of the same name is replaced. Raises JournalError."""
        values = (entry.name, entry.version, entry.sha256, json.dumps(entry.about), entry.num_rows, data)
        try:
            self._database.execute("INSERT OR REPLACE INTO image VALUES (?, ?, ?, ?, ?, ?)", values)
        except sqlite3.Error as error:
            raise JournalError(f"{self.path} cannot be written: {error}") from error

    def versions(self) -> dict[str, str]:
        """The version of every finished image, by name."""
        return dict(self._database.execute("SELECT name, version FROM image"))

    def forget(self, names: Iterable[str]) -> None:
        """Images that are not wanted any more."""
        self._database.executemany("DELETE FROM image WHERE name = ?", ((name,) for name in names))

    def entries(self, after: str = "", limit: int = -1) -> Iterator[Entry]:
        """Finished images whose names follow `after`, in the order of names; -1: all of them."""
        columns = "name, version, sha256, about, num_rows, length(data)"
        query = f"SELECT {columns} FROM image WHERE name > ? ORDER BY name LIMIT ?"
        for name, version, sha256, about, num_rows, num_bytes in self._database.execute(query, (after, limit)):
            yield Entry(name, version, sha256, json.loads(about), num_rows, num_bytes)

    def data(self, name: str) -> bytes:
        """One image's vectors."""
        return self._database.execute("SELECT data FROM image WHERE name = ?", (name,)).fetchone()[0]  # type: ignore[no-any-return]

    def remove(self) -> None:
        """Delete it: the output is written."""
        self._database.close()
        self.path.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()
