"""A finished journal of `tpvision embed` as safetensors or Parquet: one file, or shards where it would be too large.

Safetensors: laid out as the service's own answers: `embeddings` [rows, hidden], `grid_thw` [n, 3] and, as JSON in
`__metadata__`, `images` (each with its path, sha256, geometry and its rows `start` to `end`) and `errors`.
Parquet: a row an image, with `code` and `message` where it has no embedding; `embedding` is a flat list of float32.

Each file is written below a temporary name and renamed when it is whole.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from service.embed_journal import Entry, Journal
from service.safetensors_header import DTYPE_NAMES, Item, file_start
from service.tokens import STORAGE, to_float32
from service.whole_file import whole_file
from tp.spec import Dtype

FORMATS = (".safetensors", ".parquet")
MAX_ENTRIES = 100_000  # a shard; keeps a safetensors header well below the 100 MB that readers take
_GROUP_BYTES = 64 << 20  # of a Parquet row group


@dataclass(frozen=True, slots=True)
class Shape:
    """What all vectors of a run have in common."""

    model: str
    dtype: Dtype
    hidden: int


def shards_of(out: Path) -> list[Path]:
    """The files that an earlier run wrote in place of `out`, itself included."""
    digits = "[0-9]" * 5
    return [
        path
        for path in (out, *sorted(out.parent.glob(f"{out.stem}-{digits}-of-{digits}{out.suffix}")))
        if path.exists()
    ]


def write_output(journal: Journal, shape: Shape, out: Path, *, shard_bytes: int) -> list[Path]:
    """Write `out`, or OUT-00001-of-00003 and so on; the paths. Raises OSError."""
    for stale in shards_of(out):  # of a run that ended in the middle of this
        stale.unlink()
    sizes = [len(part) for part in _split(journal.entries(), shard_bytes)]
    write = _write_parquet if out.suffix == ".parquet" else _write_safetensors
    written, last = [], ""
    for number, size in enumerate(sizes, 1):
        entries = list(journal.entries(last, size))
        name = out.name if len(sizes) == 1 else f"{out.stem}-{number:05}-of-{len(sizes):05}{out.suffix}"
        with whole_file(out.with_name(name)) as partial:
            write(partial, entries, journal, shape)
        written.append(out.with_name(name))
        last = entries[-1].name
    return written


def _split(entries: Iterable[Entry], max_bytes: int) -> Iterator[list[Entry]]:
    """Runs of as many images as fit, at least one; one empty run of none."""
    part: list[Entry] = []
    num_bytes = 0
    for entry in entries:
        if part and (len(part) == MAX_ENTRIES or num_bytes + entry.num_bytes > max_bytes):
            yield part
            part, num_bytes = [], 0
        part.append(entry)
        num_bytes += entry.num_bytes
    yield part


def _write_safetensors(path: Path, entries: Sequence[Entry], journal: Journal, shape: Shape) -> None:
    images = [entry for entry in entries if not entry.is_error]
    num_rows = sum(entry.num_rows for entry in images)
    grids = np.array([entry.about["grid_thw"] for entry in images], "<i8").reshape(-1, 3)
    items = [
        Item("embeddings", DTYPE_NAMES[shape.dtype], (num_rows, shape.hidden), sum(e.num_bytes for e in images)),
        Item("grid_thw", "I64", grids.shape, grids.nbytes),
    ]
    errors = [{"path": entry.name, "sha256": entry.sha256, **entry.about} for entry in entries if entry.is_error]
    metadata = {
        "model": shape.model,
        "dtype": shape.dtype,
        "images": json.dumps(list(_placed(images))),
        "errors": json.dumps(errors),
    }
    with path.open("wb") as file:
        file.write(file_start(items, metadata))
        for entry in images:
            file.write(journal.data(entry.name))
        file.write(grids.tobytes())


def _placed(images: Iterable[Entry]) -> Iterator[dict[str, Any]]:
    """The `images` list, each with its rows of `embeddings`."""
    start = 0
    for entry in images:
        end = start + entry.num_rows
        yield {"path": entry.name, "sha256": entry.sha256, **entry.about, "start": start, "end": end}
        start = end


def _write_parquet(path: Path, entries: Sequence[Entry], journal: Journal, shape: Shape) -> None:
    import pyarrow as pa  # noqa: PLC0415 - an extra
    import pyarrow.parquet as pq  # noqa: PLC0415

    size, text = pa.list_(pa.int32(), 2), pa.string()
    columns = {
        "path": text,
        "sha256": text,
        "code": text,
        "message": text,
        "original_size": size,
        "encoded_size": size,
        "padded_size": size,
        "grid_thw": pa.list_(pa.int32(), 3),
        "num_tokens": pa.int32(),
        "patches": pa.int32(),
        "tier": pa.int32(),
        "downscaled": pa.bool_(),
        "prompt": text,
    }
    schema = pa.schema(
        [*columns.items(), ("embedding", pa.list_(pa.float32()))],
        metadata={"model": shape.model, "dtype": shape.dtype, "hidden": str(shape.hidden)},
    )
    # Bytes of equal weight side by side: those that widening bfloat16 to float32 adds then take no room.
    split = ["embedding.list.element"]
    with pq.ParquetWriter(
        path, schema, compression="zstd", use_dictionary=False, use_byte_stream_split=split
    ) as writer:
        for group in _split(entries, _GROUP_BYTES):
            about = [{"path": entry.name, "sha256": entry.sha256, **entry.about} for entry in group]
            arrays = [pa.array([values.get(name) for values in about], kind) for name, kind in columns.items()]
            writer.write_table(pa.Table.from_arrays([*arrays, _vectors(group, journal, shape)], schema=schema))


def _vectors(group: Sequence[Entry], journal: Journal, shape: Shape) -> Any:
    import pyarrow as pa  # noqa: PLC0415

    values = [np.frombuffer(journal.data(entry.name), STORAGE[shape.dtype]) for entry in group]
    ends = np.cumsum([0, *map(len, values)], dtype=np.int32)
    # A place without an offset is a null.
    offsets = [None if entry.is_error else int(end) for entry, end in zip(group, ends, strict=False)] + [int(ends[-1])]
    flat = to_float32(np.concatenate(values), shape.dtype)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(flat, pa.float32()))
