"""Files that appear under their name whole or not at all, also after a crash."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def whole_file(path: Path, *, tag: str = "") -> Iterator[Path]:
    """A temporary name beside `path`, which it gets once it is written and on the disk.

    Several writers of one path at the same time need a `tag` of their own. Raises OSError.
    """
    partial = path.with_name(f".{path.name}{tag}.partial")
    try:
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
