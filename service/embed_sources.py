"""Where `tpvision embed` finds images: files of folders and globs, and rows of Parquet files. None is decoded here."""

import glob
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

# What a folder is searched for. Elsewhere, and in the service, a file's bytes tell what it is.
SUFFIXES = frozenset(
    (".apng", ".avif", ".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".mpo", ".png", ".tif", ".tiff", ".webp")
)
_PARQUET = ".parquet"
_ROWS_AT_ONCE = 16


class SourceError(ValueError):
    """There is nothing to embed where the user says, or it cannot be read here."""


@dataclass(frozen=True, slots=True)
class Source:
    """One image file, or what should be one. `read` raises OSError."""

    name: str  # its path, or PARQUET_FILE#ROW
    version: str  # another one when the file has changed
    read: Callable[[], bytes]


@dataclass(frozen=True, slots=True)
class Sources:
    """All of them, to be iterated once; a Parquet file's rows are read as they come."""

    num_images: int
    images: Iterator[Source]


def find_sources(places: Sequence[str], *, column: str) -> Sources:
    """The images of folders (with the folders in them), globs, files and Parquet files, each file once.

    `column` of a Parquet file holds image files, paths relative to it, or structs of `bytes` and `path`. Raises
    SourceError.
    """
    paths = dict.fromkeys(path for place in places for path in _paths_of(place))
    files = [path for path in paths if path.suffix.lower() != _PARQUET]
    tables = [_open_table(path, column) for path in paths if path.suffix.lower() == _PARQUET]
    num_images = len(files) + sum(num_rows for num_rows, _ in tables)
    if not num_images:
        raise SourceError(f"no images in {', '.join(places)}; a folder is searched for {', '.join(sorted(SUFFIXES))}")
    rows = (rows for _, rows in tables)
    return Sources(num_images, itertools.chain(map(_file_source, files), itertools.chain.from_iterable(rows)))


def _paths_of(place: str) -> list[Path]:
    path = Path(place)
    if path.is_dir():
        return sorted(found for found in path.rglob("*") if found.suffix.lower() in SUFFIXES and found.is_file())
    if path.is_file():
        return [path]
    if glob.has_magic(place):
        names = glob.glob(place, recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern
        return sorted(path for path in map(Path, names) if path.is_file())
    raise SourceError(f"{place} is neither a folder, nor a file, nor a glob")


def _file_source(path: Path) -> Source:
    return Source(_text(path), _version(path), path.read_bytes)


def _open_table(path: Path, column: str) -> tuple[int, Iterator[Source]]:
    """Its number of rows, and them."""
    try:
        import pyarrow  # noqa: PLC0415 - an extra
        import pyarrow.parquet  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise SourceError(f"{path} needs the package pyarrow: pip install 'tpvision[parquet]'") from error
    try:
        table = pyarrow.parquet.ParquetFile(path)
    except (ValueError, OSError) as error:  # pyarrow's are one or the other
        raise SourceError(f"{path} is no Parquet file: {error}") from error
    if column not in table.schema_arrow.names:
        raise SourceError(f"{path} has no column {column}; it has {', '.join(table.schema_arrow.names)}")
    return table.metadata.num_rows, _rows(path, table, column)


def _rows(path: Path, table: Any, column: str) -> Iterator[Source]:
    version = _version(path)
    batches = table.iter_batches(batch_size=_ROWS_AT_ONCE, columns=[column])
    values = (value for batch in batches for value in batch.column(0).to_pylist())
    try:
        for row, value in enumerate(values):
            yield Source(f"{_text(path)}#{row:09}", version, partial(_read_cell, path.parent, value))
    except ValueError as error:  # pyarrow's are
        raise SourceError(f"{path} breaks off: {error}") from error


def _read_cell(folder: Path, value: Any) -> bytes:
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, str):
        return (folder / value).read_bytes()
    if isinstance(value, bytes):
        return value
    raise OSError(f"the row holds {type(value).__name__}, neither an image file nor a path")


def _version(path: Path) -> str:
    stat = path.stat()
    return f"{stat.st_size}:{stat.st_mtime_ns}"


def _text(path: Path) -> str:
    """A name that is text: on Linux a file's may be any bytes."""
    return str(path).encode(errors="backslashreplace").decode()
