"""SGLang's message with the embeddings of one part of a request: two frames, a pickled object and a tensor's bytes.

Pure. The object is an `EmbeddingData` without its tensor, as SGLang 0.5.23 unpickles it. Its class, the enum
and the dtype in it are named in the pickle and never imported; nothing is ever unpickled here. The receiver makes its
tensor of `dtype`, `shape` and the second frame.
"""

import pickle
from collections.abc import Sequence
from typing import Any

from service.geometry import ImagePlan
from service.tokens import Embeddings
from service.unpack import SGLangOptions

_PROTOCOL = 2
_EMBEDDING_DATA = ("sglang.srt.disaggregation.encoder.receiver", "EmbeddingData")
_MODALITY = ("sglang.srt.managers.schedule_batch", "Modality")
_IMAGE = 1  # the value of Modality.IMAGE


def message_of(
    part: SGLangOptions, embeddings: Embeddings, plans: Sequence[ImagePlan], *, with_sizes: bool
) -> tuple[bytes, memoryview]:
    """The two frames. `with_sizes`: with each image's size before any resize, which K3's prompt holds."""
    state: dict[str, Any] = {
        "req_id": part.req_id,
        "num_parts": part.num_parts,
        "part_idx": part.part_idx,
        "grid_dim": [list(plan.grid) for plan in plans],
        "shape": list(embeddings.values.shape),
        "embedding": None,
        "send_time": None,
        "error_msg": None,
        "error_code": None,
        "_mr_ptr": None,  # of another transport
    }
    if with_sizes:
        state["original_image_sizes"] = [list(plan.original_size) for plan in plans]
    modality = _name(*_MODALITY) + _plain(_IMAGE) + pickle.TUPLE1 + pickle.REDUCE
    named = _plain("dtype") + _name("torch", embeddings.dtype) + _plain("modality") + modality
    return (
        pickle.PROTO
        + bytes([_PROTOCOL])
        + (_name(*_EMBEDDING_DATA) + pickle.EMPTY_TUPLE + pickle.NEWOBJ)
        + (_plain(state) + pickle.MARK + named + pickle.SETITEMS)
        + (pickle.BUILD + pickle.STOP)
    ), embeddings.values.data.cast("B")


def _plain(value: Any) -> bytes:
    """The opcodes that push a value of numbers, strings, lists and dicts: its pickle without beginning and end."""
    return pickle.dumps(value, _PROTOCOL)[2:-1]


def _name(module: str, name: str) -> bytes:
    """The opcode that pushes what a module of the receiver's calls so."""
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()
