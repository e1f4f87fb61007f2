"""Merged tokens out of the slab and into the answer's dtype, pooled and normalised where asked. Pure; runs in a thread.

numpy has no bfloat16: it is carried as its uint16 bits. Rounding to it is to nearest, ties to even (IEEE 754), as torch
does. A result is copied here, once, unless the content cache owns it already or `service.loan` lends it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from service.errors import NonFiniteOutput
from service.loan import Loan
from tp.spec import Dtype

STORAGE: dict[Dtype, type[np.generic]] = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
_CHUNK_TOKENS = 256  # float32 scratch of a conversion stays small


@dataclass(frozen=True, slots=True)
class TokenOptions:
    """How the embeddings leave: dtype, one mean vector an image or all its tokens, each of unit length or as it is."""

    dtype: Dtype
    pooled: bool = False
    normalize: bool = False


@dataclass(frozen=True, slots=True)
class Embeddings:
    """`values` [rows, hidden] in the storage type of `dtype`; image i owns rows `bounds[i]` to `bounds[i + 1]`."""

    values: npt.NDArray[Any]
    dtype: Dtype
    bounds: Sequence[int]
    is_pooled: bool
    loan: Loan | None = None  # of `values`, which are not ours where it is set: only `data` stays as it is

    @property
    def data(self) -> memoryview | Loan:
        """The bytes of `values`, to be sent."""
        return self.values.data.cast("B") if self.loan is None else self.loan

    @property
    def hidden(self) -> int:
        """Width of a token."""
        return int(self.values.shape[1])

    def of_image(self, index: int) -> npt.NDArray[Any]:
        """View of one image's rows."""
        return self.values[self.bounds[index] : self.bounds[index + 1]]

    def shape_of(self, index: int) -> tuple[int, ...]:
        """[num_tokens, hidden], or [hidden] when pooled."""
        return (self.hidden,) if self.is_pooled else (self.bounds[index + 1] - self.bounds[index], self.hidden)

    def as_float32(self, index: int) -> npt.NDArray[np.float32]:
        """One image's rows as numbers."""
        return to_float32(self.of_image(index), self.dtype)


def read_tokens(
    views: Sequence[npt.NDArray[np.uint8]],
    source: Dtype,
    options: TokenOptions,
    param: str,
    *,
    is_shared: bool = False,
) -> Embeddings:
    """Copy each image's token bytes, uint8 [num_tokens, token_bytes] in dtype `source`, into one array.

    `is_shared`: nobody will ever write to them, so that one image asked for as it is needs no copy. Raises
    NonFiniteOutput naming `param[i]` when a finite value overflows the narrower dtype that was asked for.
    """
    tokens = [view.view(STORAGE[source]) for view in views]
    if is_shared and len(tokens) == 1 and options == TokenOptions(source):
        return Embeddings(tokens[0], source, [0, len(tokens[0])], is_pooled=False)
    counts = [1 if options.pooled else len(image) for image in tokens]
    bounds = [sum(counts[:index]) for index in range(len(counts) + 1)]
    values = np.empty((bounds[-1], tokens[0].shape[1]), STORAGE[options.dtype])
    for index, image in enumerate(tokens):
        target = values[bounds[index] : bounds[index + 1]]
        if options.pooled:
            _convert(_pool(image, source), "float32", target, options)
        else:
            _convert(image, source, target, options)
        if options.dtype == "float16" and not np.isfinite(target).all():
            raise NonFiniteOutput("a value of this image's embedding is beyond float16", param=f"{param}[{index}]")
    return Embeddings(values, options.dtype, bounds, options.pooled)


def to_float32(values: npt.NDArray[Any], source: Dtype) -> npt.NDArray[np.float32]:
    """Float32 of stored values; exact."""
    if source == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32, copy=False)


def to_bfloat16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The bits of bfloat16, rounded to nearest even; NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def _pool(tokens: npt.NDArray[Any], source: Dtype) -> npt.NDArray[np.float32]:
    total = np.zeros((1, tokens.shape[1]), np.float64)
    for start in range(0, len(tokens), _CHUNK_TOKENS):
        total += to_float32(tokens[start : start + _CHUNK_TOKENS], source).sum(axis=0, dtype=np.float64)
    return (total / len(tokens)).astype(np.float32)


def _convert(tokens: npt.NDArray[Any], source: Dtype, target: npt.NDArray[Any], options: TokenOptions) -> None:
    if source == options.dtype and not options.normalize:
        target[:] = tokens
        return
    for start in range(0, len(tokens), _CHUNK_TOKENS):
        part = to_float32(tokens[start : start + _CHUNK_TOKENS], source)
        if options.normalize:
            part = part / np.maximum(np.linalg.norm(part, axis=1, keepdims=True), np.finfo(np.float32).tiny)
        out = target[start : start + _CHUNK_TOKENS]
        with np.errstate(over="ignore"):  # an overflow shows as infinity, which the caller looks for
            out[:] = to_bfloat16_bits(part) if options.dtype == "bfloat16" else part
