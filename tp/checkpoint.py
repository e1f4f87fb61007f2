"""The vision tensors of a checkpoint folder: which file holds each, where, and whether all of them are as expected.

Plain file reads, no torch: the front-end and `tpvision plan` may call it too. It reads the safetensors index and the
headers of the files that hold vision tensors, and no other file: the text model's shards may be absent. It does not
load weights (tp/weights.py does). Names and shapes are those of the published checkpoints (Kimi K3, K2.5, Kimi-VL).
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tp.spec import CHANNELS, EncoderSpec

INDEX_NAME = "model.safetensors.index.json"
TOWER_PREFIX = "vision_tower."
MAX_HEADER_BYTES = 100_000_000  # the safetensors format's own limit
FINGERPRINT_BYTES = 4096  # from each end of a tensor
ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
MLP_UNIT = 8  # MLP columns are split in runs of 8, which matrix units like
_NAMED_AT_MOST = 8  # tensors named in one message

Shape = tuple[int, ...]


class CheckpointError(ValueError):
    """A checkpoint folder lacks something, or holds something that is not this encoder."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor on disk. `start` and `stop` are byte offsets in the file."""

    name: str
    file: Path
    dtype: str  # safetensors' name: F32, BF16, F16, ...
    shape: Shape
    start: int
    stop: int


def shard_range(total: int, *, unit: int, rank: int, world_size: int) -> tuple[int, int]:
    """The half-open range of `total` that `rank` owns: whole units, as even as they go; the last may be cut short.

    4,096 in units of 8 over 3 ranks: 0-1360, 1360-2728, 2728-4096.
    """
    units = -(-total // unit)
    return min(total, rank * units // world_size * unit), min(total, (rank + 1) * units // world_size * unit)


def read_vision_tensors(model_dir: Path, spec: EncoderSpec) -> dict[str, TensorEntry]:
    """Every tower and projector tensor in the folder, by name.

    Raises CheckpointError naming the file if there is no checkpoint, or a file is missing, truncated or malformed.
    """
    prefixes = (TOWER_PREFIX, f"{spec.projector_prefix}.")
    table: dict[str, TensorEntry] = {}
    for file in _vision_files(model_dir, prefixes):
        for entry in _read_header(file, prefixes):
            if entry.name in table:
                raise CheckpointError(f"{entry.name} is both in {table[entry.name].file.name} and in {file.name}")
            table[entry.name] = entry
    return table


def expected_tensors(spec: EncoderSpec) -> dict[str, Shape]:
    """Name and shape of every tensor that the encoder needs."""
    hidden, merged = spec.hidden_size, 4 * spec.hidden_size
    tower: dict[str, Shape] = {"patch_embed.pos_emb.weight": (spec.pos_emb_height, spec.pos_emb_width, hidden)}
    tower |= _linear("patch_embed.proj", (hidden, CHANNELS, spec.patch_size, spec.patch_size), spec.has_bias)
    for index in range(spec.num_layers):
        block = f"encoder.blocks.{index}"
        tower |= _norm(f"{block}.norm0", hidden, spec) | _norm(f"{block}.norm1", hidden, spec)
        tower |= _linear(f"{block}.wqkv", (3 * spec.qkv_size, hidden), spec.has_bias)
        tower |= _linear(f"{block}.wo", (hidden, spec.qkv_size), spec.has_bias)
        tower |= _linear(f"{block}.mlp.fc0", (spec.mlp_size, hidden), spec.has_bias)
        tower |= _linear(f"{block}.mlp.fc1", (hidden, spec.mlp_size), spec.has_bias)
    tower |= _norm("encoder.final_layernorm", hidden, spec)
    first, second = projector_linears(spec)
    projector = _linear(first, (merged, merged), spec.has_bias)
    projector |= _linear(second, (spec.text_hidden_size, merged), spec.has_bias)
    projector |= _norm(spec.projector, hidden if spec.projector == "pre_norm" else spec.text_hidden_size, spec)
    return {TOWER_PREFIX + name: shape for name, shape in tower.items()} | {
        f"{spec.projector_prefix}.{name}": shape for name, shape in projector.items()
    }


def projector_linears(spec: EncoderSpec) -> tuple[str, str]:
    """The checkpoint's names of the projector's two linears: a sequence (0 and 2, 1 is the GELU), or Kimi-VL's own."""
    return ("linear_1", "linear_2") if spec.projector_prefix == "multi_modal_projector" else ("proj.0", "proj.2")


def check_tensors(spec: EncoderSpec, table: Mapping[str, TensorEntry]) -> None:
    """Raise CheckpointError naming each missing, misshapen or left-over tensor, or a mix of dtypes."""
    expected = expected_tensors(spec)
    faults = [f"{name} is missing, expected {list(expected[name])}" for name in expected if name not in table]
    for name, entry in table.items():
        if name not in expected:
            faults.append(f"{name} {list(entry.shape)} is left over, this encoder has no such tensor")
        elif entry.shape != expected[name]:
            faults.append(f"{name} is {list(entry.shape)}, expected {list(expected[name])}")
    faults += _dtype_faults(table.values())
    if faults:
        more = len(faults) - _NAMED_AT_MOST
        raise CheckpointError("; ".join(faults[:_NAMED_AT_MOST]) + (f"; and {more} more" if more > 0 else ""))


def fingerprint(table: Mapping[str, TensorEntry]) -> str:
    """SHA-256 in hex over name, dtype, shape and the first and last 4 KiB of each tensor, sorted by name."""
    digest = hashlib.sha256()
    for name in sorted(table):
        entry = table[name]
        digest.update(f"{name} {entry.dtype} {list(entry.shape)}\n".encode())
        with entry.file.open("rb") as file:
            for start in (entry.start, max(entry.start, entry.stop - FINGERPRINT_BYTES)):
                file.seek(start)
                digest.update(file.read(min(FINGERPRINT_BYTES, entry.stop - start)))
    return digest.hexdigest()


def _linear(name: str, shape: Shape, has_bias: bool) -> dict[str, Shape]:
    return {f"{name}.weight": shape} | ({f"{name}.bias": shape[:1]} if has_bias else {})


def _norm(name: str, width: int, spec: EncoderSpec) -> dict[str, Shape]:
    return _linear(name, (width,), spec.norm == "layernorm")


def _dtype_faults(entries: Iterable[TensorEntry]) -> list[str]:
    first: dict[str, str] = {}
    for entry in entries:
        first.setdefault(entry.dtype, entry.name)
    unknown = [
        f"{name} is {dtype}, not one of {', '.join(ITEM_BYTES)}"
        for dtype, name in first.items()
        if dtype not in ITEM_BYTES
    ]
    mixed = "dtypes are mixed: " + ", ".join(f"{name} is {dtype}" for dtype, name in first.items())
    return unknown or ([mixed] if len(first) > 1 else [])


def _vision_files(model_dir: Path, prefixes: tuple[str, ...]) -> list[Path]:
    """Files to open: those that the index names for a vision tensor; without an index, all there are."""
    index = model_dir / INDEX_NAME
    if index.is_file():
        names = sorted({file for name, file in _weight_map(index).items() if name.startswith(prefixes)})
        for name in names:
            if Path(name).name != name:
                raise CheckpointError(f"{index} names {name!r}, which is not a file of its folder")
        return [model_dir / name for name in names]
    single = model_dir / "model.safetensors"
    files = [single] if single.is_file() else sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{model_dir} holds neither {INDEX_NAME} nor a .safetensors file")
    return files


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        return {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} has no readable weight_map: {error!r}") from error


def _read_header(path: Path, prefixes: tuple[str, ...]) -> list[TensorEntry]:
    """The vision tensors of one file. Format: 8 bytes little-endian header length, JSON header, data."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
                raise CheckpointError(
                    f"{path} is truncated or no safetensors file: {size} bytes, with a header of {length} announced"
                )
            header = json.loads(file.read(length))
            if not isinstance(header, dict):
                raise ValueError("no JSON object")
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; the index names it for vision tensors") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except ValueError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} has a malformed header: {error}") from error
    entries = [_entry(path, name, value, 8 + length) for name, value in header.items() if name.startswith(prefixes)]
    for entry in entries:
        if entry.stop > size:
            raise CheckpointError(f"{path} is truncated: {entry.name} ends at byte {entry.stop}, the file has {size}")
    return entries


def _entry(path: Path, name: str, value: Any, data_start: int) -> TensorEntry:
    try:
        dtype, shape = str(value["dtype"]), tuple(int(size) for size in value["shape"])
        start, stop = (data_start + int(offset) for offset in value["data_offsets"])
    except (LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} has a malformed header at {name}: {error!r}") from error
    if dtype in ITEM_BYTES and stop - start != math.prod(shape) * ITEM_BYTES[dtype]:
        raise CheckpointError(f"{path}: {name} {list(shape)} {dtype} does not fill its {stop - start} bytes")
    return TensorEntry(name, path, dtype, shape, start, stop)
