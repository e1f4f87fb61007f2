"""The vision tensors of a checkpoint folder: which file holds each, where, and whether all of them are as expected.

Plain file reads, no torch: the front-end and `tpvision plan` may call it too. It reads the safetensors index and the
headers of the files that hold vision tensors, and no other file: the text model's shards may be absent. It does not
load weights (tp/weights.py does). Names and shapes are those of the published checkpoints (Kimi K3, K2.5, Kimi-VL).
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors

from tp.spec import CHANNELS, MAX_JSON_BYTES, Dtype, EncoderSpec, FolderError, SpecError, read_json

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
TOWER_PREFIX = "vision_tower."
# Two spellings of the projector are published, of the same tensors: prefix -> its two linears. In the first they are
# members 0 and 2 of a sequence whose 1 is the GELU. A folder may use either, but not both.
PROJECTOR_LINEARS = {"mm_projector": ("proj.0", "proj.2"), "multi_modal_projector": ("linear_1", "linear_2")}
FINGERPRINT_BYTES = 4096  # from each end of a tensor
ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
_EXPONENTS = {"F32": ("<u4", 0x7F80_0000), "BF16": ("<u2", 0x7F80), "F16": ("<u2", 0x7C00)}  # all set: NaN, infinity
DTYPES: dict[str, Dtype] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
MLP_UNIT = 8  # MLP columns are split in runs of 8, which matrix units like
_NAMED_AT_MOST = 8  # tensors named in one message
_PREFIXES = (TOWER_PREFIX, *(f"{prefix}." for prefix in PROJECTOR_LINEARS))
_FOREIGN_TOWERS = ("vision_tower.", "vision_model.", "visual.")  # what towers are called below other prefixes
_LFS_POINTER = b"version https://git-lfs"

Shape = tuple[int, ...]


class CheckpointError(FolderError):
    """A checkpoint folder lacks something, or holds something that is not this encoder."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor on disk. `start` and `stop` are byte offsets in the file."""

    name: str  # in the spelling that the spec expects
    stored_as: str  # in the file's own
    file: Path
    dtype: str  # safetensors' name: F32, BF16, F16, ...
    shape: Shape
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return self.stop - self.start


def shard_range(total: int, *, unit: int, rank: int, world_size: int) -> tuple[int, int]:
    """The half-open range of `total` that `rank` owns: whole units, as even as they go; the last may be cut short.

    4,096 in units of 8 over 3 ranks: 0-1360, 1360-2728, 2728-4096.
    """
    units = -(-total // unit)
    return min(total, rank * units // world_size * unit), min(total, (rank + 1) * units // world_size * unit)


def read_vision_tensors(model_dir: Path, spec: EncoderSpec) -> dict[str, TensorEntry]:
    """Every tower and projector tensor in the folder, by name.

    Raises CheckpointError naming the file if there is no checkpoint, it holds no vision tensor, or a file is missing,
    truncated or malformed.
    """
    table: dict[str, TensorEntry] = {}
    others: list[str] = []
    for file in vision_files(model_dir):
        entries, skipped = _read_header(file, spec)
        others += skipped
        for entry in entries:
            if entry.name in table:
                raise CheckpointError(_twice(table[entry.name], entry))
            table[entry.name] = entry
    if not table:
        raise CheckpointError(_no_vision(model_dir, others))
    return table


def vision_files(model_dir: Path) -> list[Path]:
    """Files to open: those that the index names for a vision tensor; without an index, all there are.

    They need not exist. Raises CheckpointError if there is no checkpoint, or its index names no vision tensor.
    """
    index = model_dir / INDEX_NAME
    if index.exists():
        weight_map = _weight_map(index)
        names = sorted({file for name, file in weight_map.items() if name.startswith(_PREFIXES)})
        if not names:
            raise CheckpointError(_no_vision(index, list(weight_map)))
        for name in names:
            if Path(name).name != name or name in ("", "..") or not name.isprintable():
                raise CheckpointError(f"{index} names {name!r}, which is not a file of its folder")
        return [model_dir / name for name in names]
    single = model_dir / SINGLE_NAME
    files = [single] if single.is_file() else sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{model_dir} holds neither {INDEX_NAME} nor a .safetensors file")
    return files


def check_index(model_dir: Path, spec: EncoderSpec) -> None:
    """Raise CheckpointError naming each tensor that the index, if there is one, lacks or has left over.

    It tells before a shard is downloaded what `check_tensors` would tell afterwards.
    """
    index = model_dir / INDEX_NAME
    if index.exists() and vision_files(model_dir):
        names = [_expected_name(name, spec) for name in _weight_map(index) if name.startswith(_PREFIXES)]
        _raise(f"{index.name}: ", _name_faults(expected_tensors(spec), dict.fromkeys(names)))


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
    """The checkpoint's names of the projector's two linears."""
    return PROJECTOR_LINEARS[spec.projector_prefix]


def check_tensors(spec: EncoderSpec, table: Mapping[str, TensorEntry]) -> None:
    """Raise CheckpointError naming each missing, misshapen or left-over tensor, or a mix of dtypes."""
    expected = expected_tensors(spec)
    faults = _name_faults(expected, {name: entry.shape for name, entry in table.items()})
    for name, entry in table.items():
        if name in expected and entry.shape != expected[name]:
            faults.append(f"{name} is {list(entry.shape)}, expected {list(expected[name])}")
    _raise("", faults + _dtype_faults(table.values()))


def check_dtype(spec: EncoderSpec, table: Mapping[str, TensorEntry], wanted: Dtype | Literal["auto"]) -> Dtype:
    """The dtype of the checked table's tensors. Raises CheckpointError where `auto` would cast them unasked."""
    stored = DTYPES[next(iter(table.values())).dtype]
    if wanted == "auto" and stored != spec.dtype:
        raise CheckpointError(
            f"the vision tensors are {stored}, but config.json says {spec.dtype}: say which to compute in with "
            "model.dtype (--dtype)"
        )
    return stored


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


def count_non_finite(entry: TensorEntry) -> int:
    """How many values of a checked tensor are NaN or infinite. Reads all of it."""
    kind, exponent = _EXPONENTS[entry.dtype]
    bits = np.fromfile(entry.file, kind, math.prod(entry.shape), offset=entry.start)
    return int(np.count_nonzero((bits & exponent) == exponent))


def _linear(name: str, shape: Shape, has_bias: bool) -> dict[str, Shape]:
    return {f"{name}.weight": shape} | ({f"{name}.bias": shape[:1]} if has_bias else {})


def _norm(name: str, width: int, spec: EncoderSpec) -> dict[str, Shape]:
    return _linear(name, (width,), spec.norm == "layernorm")


def _expected_name(stored: str, spec: EncoderSpec) -> str:
    """A tensor's name in the spelling of the projector that the spec expects."""
    prefix, _, rest = stored.partition(".")
    if prefix == spec.projector_prefix or prefix not in PROJECTOR_LINEARS:
        return stored
    for theirs, ours in zip(PROJECTOR_LINEARS[prefix], projector_linears(spec), strict=True):
        if rest.startswith(f"{theirs}."):
            rest = ours + rest.removeprefix(theirs)
            break
    return f"{spec.projector_prefix}.{rest}"


def _twice(first: TensorEntry, second: TensorEntry) -> str:
    if first.file == second.file:
        return f"{first.stored_as} and {second.stored_as} in {first.file.name} are two spellings of one tensor"
    return f"{first.name} is both in {first.file.name} and in {second.file.name}"


def _no_vision(where: Path, names: Iterable[str]) -> str:
    message = f"{where} holds no tensor called {' or '.join(f'{prefix}*' for prefix in _PREFIXES)}"
    foreign = next((name for name in names if any(tower in name for tower in _FOREIGN_TOWERS)), None)
    if foreign is None:
        return message + ": no tower of a published Kimi checkpoint"
    return (
        f"{message}, but {foreign}: not a published layout (in transformers' own, say, rows of q and k are in another "
        "order); use the published checkpoint"
    )


def _name_faults(expected: Mapping[str, Shape], found: Mapping[str, Shape | None]) -> list[str]:
    """What is missing, and what is left over; `found` holds shapes where they are known."""
    faults = [f"{name} is missing, expected {list(shape)}" for name, shape in expected.items() if name not in found]
    for name, shape in found.items():
        if name not in expected:
            size = "" if shape is None else f" {list(shape)}"
            faults.append(f"{name}{size} is left over, this encoder has no such tensor")
    return faults


def _raise(prefix: str, faults: list[str]) -> None:
    if faults:
        more = len(faults) - _NAMED_AT_MOST
        raise CheckpointError(prefix + "; ".join(faults[:_NAMED_AT_MOST]) + (f"; and {more} more" if more > 0 else ""))


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


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = read_json(index).get("weight_map")
    except SpecError as error:
        raise CheckpointError(f"{index} has no readable weight_map: {error}") from error
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index} has no readable weight_map: not an object of file names")
    return weight_map


def _read_header(path: Path, spec: EncoderSpec) -> tuple[list[TensorEntry], list[str]]:
    """The vision tensors of one file, and the names of its others.

    Format: 8 bytes little-endian header length, JSON header, data. Where it is not, our messages have names and
    numbers; the library, which the ranks read with, has the last word: no hole, no overlap, no byte left over.
    """
    try:
        size, length, header = _parse_header(path)
        entries = [
            _entry(path, name, spec, value, 8 + length) for name, value in header.items() if name.startswith(_PREFIXES)
        ]
        for entry in entries:
            if entry.stop > size:
                raise CheckpointError(
                    f"{path} is truncated: {entry.name} ends at byte {entry.stop}, the file has {size}"
                )
        with safetensors.safe_open(path, framework="np"):
            pass
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; the index names it for vision tensors") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except (ValueError, RecursionError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path} has a malformed header: {error}") from error
    return entries, [name for name in header if not name.startswith(_PREFIXES)]


def _parse_header(path: Path) -> tuple[int, int, dict[str, Any]]:
    """Bytes of the file and of its header, and the header. Raises CheckpointError, or what open and json.loads do."""
    if path.exists() and not path.is_file():  # opening a named pipe would wait for ever
        raise CheckpointError(f"{path} is not a regular file")
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(len(_LFS_POINTER))
        if start == _LFS_POINTER:
            raise CheckpointError(f"{path} is a git-lfs pointer of {size} bytes, not the file: run `git lfs pull`")
        length = int.from_bytes(start[:8], "little")
        file.seek(8)
        if not 2 <= length <= min(size - 8, MAX_JSON_BYTES):
            raise CheckpointError(
                f"{path} is truncated or no safetensors file: {size} bytes, with a header of {length} announced"
            )
        header = json.loads(file.read(length), object_pairs_hook=_each_once)
    if not isinstance(header, dict):
        raise ValueError("no JSON object")
    return size, length, header


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Of two values under one name, readers take one in silence."""
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError(f"{Counter(name for name, _ in pairs).most_common(1)[0][0]} is there twice")
    return values


def _entry(path: Path, stored_as: str, spec: EncoderSpec, value: Any, data_start: int) -> TensorEntry:
    name = _expected_name(stored_as, spec)
    try:
        dtype, shape, (start, stop) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        fills = stop - start == math.prod(shape) * ITEM_BYTES[dtype] if dtype in ITEM_BYTES else True
        entry = TensorEntry(name, stored_as, path, dtype, shape, data_start + start, data_start + stop)
    except (LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} has a malformed header at {stored_as}: {error!r}") from error
    if not fills:
        raise CheckpointError(f"{path}: {name} {list(shape)} {dtype} does not fill its {stop - start} bytes")
    return entry
