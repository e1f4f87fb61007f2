"""The vision part of a checkpoint folder, written as a slim folder of its own: `tpvision extract`.

    model.safetensors                         the tower's and the projector's tensors, and no other
    config.json, preprocessor_config.json     unchanged, byte for byte
    tpvision_slim.json                        where they came from, and the SHA-256 of each file

Tensors are copied one after the other in small blocks. Everything is written below a temporary name, read back and
compared with the source, then renamed into place; a run that was cut short can be repeated. No network, no torch.
Called by the command, and by service/fetch_model.py with what it downloaded.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from service.file_progress import Report
from service.safetensors_header import Item, file_start
from tp.checkpoint import (
    DTYPES,
    SINGLE_NAME,
    CheckpointError,
    TensorEntry,
    check_tensors,
    fingerprint,
    read_vision_tensors,
)
from tp.spec import Dtype, FolderError, SpecError, read_json, read_spec

CONFIG_NAMES = ("config.json", "preprocessor_config.json")
PROVENANCE_NAME = "tpvision_slim.json"
_PARTIAL_PREFIX = ".tpvision-partial-"
_NOT_OURS_BUT_FINE = {"lost+found"}  # the root of a fresh volume
_BLOCK_BYTES = 1 << 20


class ExtractError(FolderError):
    """The folder to write cannot be used, or what was written is not what was read."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file that vision tensors came from. `sha256` where it was checked."""

    name: str
    num_bytes: int
    sha256: str | None


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a checkpoint came from, if from a hub."""

    repo: str | None = None
    revision: str | None = None  # the commit
    sha256: Mapping[str, str] = field(default_factory=dict)  # file name -> checksum that was verified


@dataclass(frozen=True, slots=True)
class Provenance:
    """What tpvision_slim.json holds."""

    repo: str | None
    revision: str | None
    source_files: tuple[SourceFile, ...]
    fingerprint: str
    sha256: Mapping[str, str]  # of each file of the slim folder


@dataclass(frozen=True, slots=True)
class Slim:
    """A slim folder, verified. `is_new` is false where it was there already."""

    folder: Path
    provenance: Provenance
    dtype: Dtype
    num_tensors: int
    num_bytes: int  # of its tensors
    is_new: bool


def extract(source: Path, out: Path, *, origin: Origin | None = None, report: Report | None = None) -> Slim:
    """Write the vision part of checkpoint folder `source` into folder `out`, made if missing.

    Does nothing where `out` holds it already. Raises SpecError or CheckpointError for a source that is not whole,
    ExtractError for an `out` that holds anything else, a disk that is too small, or when reading or writing fails.
    """
    spec = read_spec(source)
    table = read_vision_tensors(source, spec)
    check_tensors(spec, table)
    with explained(f"reading {source}"):
        provenance = _provenance(source, table, origin or Origin())
    refuse_foreign(out)
    with explained(f"writing {out}"):
        out.mkdir(parents=True, exist_ok=True)
        return _fill(source, out, table=table, provenance=provenance, report=report or (lambda done, total: None))


def _fill(source: Path, out: Path, *, table: Mapping[str, TensorEntry], provenance: Provenance, report: Report) -> Slim:
    with _locked(out):
        found = read_provenance(out)
        if found is not None and found.sha256 != {**provenance.sha256, SINGLE_NAME: _sha256(_content(table))}:
            raise other_content(out, found, f"what {source} holds")
        if found is not None and is_whole(out, found):
            return open_slim(out, found, is_new=False)
        check_space(out, sum(entry.num_bytes for entry in table.values()))
        written = _write(source, out, table=table, provenance=provenance, report=report)
        return open_slim(out, written, is_new=True)


def open_slim(out: Path, provenance: Provenance, *, is_new: bool) -> Slim:
    """The slim folder `out`, its tensors checked once more."""
    spec = read_spec(out)
    table = read_vision_tensors(out, spec)
    check_tensors(spec, table)
    dtype = DTYPES[next(iter(table.values())).dtype]
    return Slim(out, provenance, dtype, len(table), sum(entry.num_bytes for entry in table.values()), is_new)


def refuse_foreign(out: Path) -> None:
    """Raise ExtractError unless `out` is missing, empty, or a slim folder, whole or cut short."""
    with explained(f"writing {out}"):
        if not out.exists() and not out.is_symlink():
            return
        if not out.is_dir():
            raise ExtractError(f"{out} is not a folder")
        paths = [path for path in out.iterdir() if not path.name.startswith(_PARTIAL_PREFIX)]
    names = {path.name for path in paths} - _NOT_OURS_BUT_FINE
    if names and PROVENANCE_NAME not in names:
        raise ExtractError(f"{out} is not empty and not written by tpvision; name an empty or a new folder")


def read_provenance(out: Path) -> Provenance | None:
    """What folder `out` says of itself, if it is a slim folder."""
    path = out / PROVENANCE_NAME
    try:
        if not path.exists():
            return None
        stored = read_json(path)
        files = tuple(SourceFile(item["name"], item["num_bytes"], item["sha256"]) for item in stored["source_files"])
        return Provenance(stored["repo"], stored["revision"], files, str(stored["fingerprint"]), dict(stored["sha256"]))
    except (SpecError, ValueError, LookupError, TypeError) as error:
        raise ExtractError(f"{path} is not readable: {error!r}; name another folder") from error


def is_whole(out: Path, provenance: Provenance) -> bool:
    """Whether each file of the slim folder is there with the checksum that was written down."""
    return all(
        (out / name).is_file() and file_sha256(out / name) == sha256 for name, sha256 in provenance.sha256.items()
    )


def file_sha256(path: Path) -> str:
    """SHA-256 in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_writable(out: Path) -> None:
    """Raise ExtractError unless files can be written in `out`, or where it will be made."""
    with (
        explained(f"writing {out}"),
        tempfile.TemporaryDirectory(prefix=_PARTIAL_PREFIX, dir=_existing(out)),
    ):
        pass


def other_content(out: Path, found: Provenance, wanted: str) -> ExtractError:
    """What to raise where the slim folder `out` is of something else."""
    return ExtractError(f"{out} holds {_title(found)}, which is not {wanted}; name another folder")


@contextlib.contextmanager
def explained(step: str) -> Iterator[None]:
    """Failing files as ExtractError, with what was being done."""
    try:
        yield
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise ExtractError(f"{step}: {where}{error.strerror or error}") from error


def check_space(folder: Path, num_bytes: int) -> None:
    """Raise ExtractError, naming both numbers, unless the file system of `folder` has that much room."""
    free = shutil.disk_usage(_existing(folder)).free
    if free < num_bytes:
        raise ExtractError(f"{num_bytes:,} bytes are needed below {folder}, and {free:,} are free")


def _existing(folder: Path) -> Path:
    """It, or the nearest folder above that is there."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def _provenance(source: Path, table: Mapping[str, TensorEntry], origin: Origin) -> Provenance:
    files = sorted({entry.file for entry in table.values()})
    return Provenance(
        repo=origin.repo,
        revision=origin.revision,
        source_files=tuple(SourceFile(file.name, file.stat().st_size, origin.sha256.get(file.name)) for file in files),
        fingerprint=fingerprint(table),
        sha256={name: file_sha256(source / name) for name in CONFIG_NAMES},
    )


def _title(provenance: Provenance) -> str:
    weights = f"weights {provenance.fingerprint[:12]}"
    return weights if provenance.repo is None else f"{provenance.repo} at {provenance.revision} ({weights})"


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[None]:
    """One writer at a time; the next waits. File systems without locks do without."""
    descriptor = os.open(out, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write(
    source: Path,
    out: Path,
    *,
    table: Mapping[str, TensorEntry],
    provenance: Provenance,
    report: Report,
) -> Provenance:
    for left_over in out.glob(f"{_PARTIAL_PREFIX}*"):  # of a run that was killed; we hold the lock
        shutil.rmtree(left_over)
    with tempfile.TemporaryDirectory(prefix=_PARTIAL_PREFIX, dir=out) as name:
        partial = Path(name)
        checksum = _write_tensors(partial / SINGLE_NAME, table, report)
        for config in CONFIG_NAMES:
            (partial / config).write_bytes((source / config).read_bytes())
        whole = Provenance(
            provenance.repo,
            provenance.revision,
            provenance.source_files,
            provenance.fingerprint,
            {**provenance.sha256, SINGLE_NAME: checksum},
        )
        _verify(partial, whole)
        what = {"what": "the vision part of a checkpoint, written by tpvision"}
        (partial / PROVENANCE_NAME).write_text(json.dumps({**what, **asdict(whole)}, indent=2) + "\n")
        # The provenance first: from then on the folder is ours, and whole once the weights have their name.
        for finished in (PROVENANCE_NAME, *CONFIG_NAMES, SINGLE_NAME):
            (partial / finished).replace(out / finished)
    return whole


def _write_tensors(path: Path, table: Mapping[str, TensorEntry], report: Report) -> str:
    """One safetensors file with these tensors; its SHA-256."""
    total, done = sum(entry.num_bytes for entry in table.values()), 0

    def written() -> Iterator[bytes]:
        nonlocal done
        for block in _content(table):
            file.write(block)
            yield block
            done += len(block)
            report(min(done, total), total)

    with path.open("xb") as file:
        checksum = _sha256(written())
        file.flush()
        os.fsync(file.fileno())
    return checksum


def _content(table: Mapping[str, TensorEntry]) -> Iterator[bytes]:
    """The bytes of a safetensors file with these tensors in order of their names."""
    entries = [table[name] for name in sorted(table)]
    yield file_start(Item(entry.name, entry.dtype, entry.shape, entry.num_bytes) for entry in entries)
    for entry in entries:
        yield from _blocks(entry)


def _sha256(blocks: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for block in blocks:
        digest.update(block)
    return digest.hexdigest()


def _blocks(entry: TensorEntry) -> Iterator[bytes]:
    with entry.file.open("rb") as file:
        file.seek(entry.start)
        left = entry.num_bytes
        while left:
            block = file.read(min(left, _BLOCK_BYTES))
            if not block:
                raise CheckpointError(f"{entry.file} became shorter while {entry.name} was read")
            left -= len(block)
            yield block


def _verify(folder: Path, expected: Provenance) -> None:
    """Read back what was written: all of it, and the tensors as a reader finds them."""
    if not is_whole(folder, expected):
        raise ExtractError(f"what was read back in {folder} is not what was written")
    spec = read_spec(folder)
    table = read_vision_tensors(folder, spec)
    check_tensors(spec, table)
    written = fingerprint(table)
    if written != expected.fingerprint:
        raise ExtractError(f"the weights written have fingerprint {written}, those read {expected.fingerprint}")
