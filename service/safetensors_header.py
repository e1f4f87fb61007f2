"""The start of a safetensors file, for writers that stream: the library's wants all tensors of a file in memory.

Format: 8 bytes little-endian header length, JSON header, then the tensors' bytes one after the other in its order.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from tp.spec import Dtype

DTYPE_NAMES: dict[Dtype, str] = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


class Item(NamedTuple):
    """One tensor to come."""

    name: str
    dtype: str  # safetensors' name: one of DTYPE_NAMES, I64, ...
    shape: tuple[int, ...]
    num_bytes: int


def file_start(items: Iterable[Item], metadata: Mapping[str, str] | None = None) -> bytes:
    """Length and header, padded so that the data starts aligned to 8 bytes."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    start = 0
    for item in items:
        end = start + item.num_bytes
        entries[item.name] = {"dtype": item.dtype, "shape": list(item.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
