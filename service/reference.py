"""Embeddings of the self-test in a file, so that two installations can be proved equal; and how far two results are.

A safetensors file with one float32 tensor, `embeddings`, and where it came from in the metadata. `service.check` writes
and compares; nothing is computed here.
"""

import math
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy

from tp.spec import Dtype, FolderError

Tokens = npt.NDArray[np.float32]

# Of the whole difference (Frobenius norm) to the whole result. Measured on the goldens, over implementations, world
# sizes and packing: 1.8e-6 in float32, 1.6e-2 in bfloat16.
TOLERANCE: dict[Dtype, float] = {"float32": 1e-5, "bfloat16": 3e-2, "float16": 3e-2}
_FORMAT = "tpvision reference 1"


class ReferenceFileError(FolderError):
    """A reference file cannot be read or written, or is none."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where embeddings came from."""

    model_type: str
    fingerprint: str  # of the weights: tp.checkpoint.fingerprint
    dtype: Dtype  # computed in
    version: str  # of tpvision
    device: str
    world_size: str


@dataclass(frozen=True, slots=True)
class Distance:
    """How far one result is from another."""

    relative: float
    max_abs: float
    tolerance: float  # on `relative`

    @property
    def is_within(self) -> bool:
        """Whether they count as equal. NaN is not."""
        return self.relative <= self.tolerance


def distance(found: Tokens, expected: Tokens, *dtypes: Dtype) -> Distance:
    """Between two results of one shape, which were computed in these dtypes: the widest tolerance counts."""
    with np.errstate(invalid="ignore", over="ignore"):  # NaN and infinity show in the result
        difference = found.astype(np.float64) - expected
        size, whole = float(np.linalg.norm(difference)), float(np.linalg.norm(expected.astype(np.float64)))
    relative = size / whole if whole else (math.inf if size else 0.0)
    return Distance(relative, float(np.abs(difference).max()), max(TOLERANCE[dtype] for dtype in dtypes))


def write_reference(path: Path, embeddings: Tokens, origin: Origin) -> None:
    """Store embeddings with their origin. Raises ReferenceFileError."""
    try:
        safetensors.numpy.save_file({"embeddings": embeddings}, path, {"format": _FORMAT, **asdict(origin)})
    except (OSError, safetensors.SafetensorError) as error:
        raise ReferenceFileError(f"{path} cannot be written: {error}") from error


def read_reference(path: Path) -> tuple[Tokens, Origin]:
    """What `write_reference` stored. Raises ReferenceFileError."""
    if path.exists() and not path.is_file():  # opening a named pipe would wait for ever
        raise ReferenceFileError(f"{path} cannot be read as a reference: it is not a regular file")
    try:
        with safetensors.safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            if metadata.pop("format", None) != _FORMAT:
                raise ReferenceFileError(f"{path} was not written by `tpvision check --write-reference`")
            tokens, origin = file.get_tensor("embeddings"), Origin(**metadata)
    except (OSError, TypeError, safetensors.SafetensorError) as error:
        raise ReferenceFileError(f"{path} cannot be read as a reference: {error}") from error
    if origin.dtype not in TOLERANCE or tokens.dtype != np.float32 or tokens.ndim != 2:
        text = f"{origin.dtype} tokens stored as {tokens.dtype} {list(tokens.shape)}"
        raise ReferenceFileError(f"{path} cannot be read as a reference: {text}")
    return tokens, origin
