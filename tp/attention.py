"""Full attention inside each packed image, behind one function.

Shapes: q, k, v [N, H, d] with N packed patches, H heads of this rank, d the head size; scale 1 / sqrt(d).
No back-end here forms an [n, n] matrix: one that would is refused, not fallen back to. Called by tp/model.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {
    "cpu": [SDPBackend.FLASH_ATTENTION],  # any head size, float32 and half types
    "cuda": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION],  # efficient takes float32 too
}


class AttentionError(RuntimeError):
    """No memory-lean attention kernel takes these tensors on this device."""


@dataclass(frozen=True, slots=True)
class Sequences:
    """Which rows belong together: patches per image, and the same as offsets on the device."""

    lengths: tuple[int, ...]
    cu_seqlens: Tensor  # [images + 1] int32

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> "Sequences":
        """Images of these lengths, packed in this order."""
        offsets = [0, *accumulate(lengths)]
        return cls(tuple(lengths), torch.tensor(offsets, dtype=torch.int32, device=device))


def attend(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences) -> Tensor:
    """Attention of every patch to the patches of its own image: [N, H, d].

    q's memory may be reused for the result. Raises AttentionError where only a materialising kernel would do.
    """
    if _has_varlen(q):
        return _varlen(q, k, v, sequences)
    if len(sequences.lengths) == 1:
        return _one_image(q, k, v)
    first = 0
    for length in sequences.lengths:
        rows = slice(first, first + length)
        q[rows] = _one_image(q[rows], k[rows], v[rows])
        first += length
    return q


def describe_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Which kernel `attend` uses for such tensors, in words for a person."""
    probe = torch.empty(1, 1, head_dim, dtype=dtype, device=device)
    if _has_varlen(probe):
        return "flash attention, packed images in one call"
    if device.type == "cpu":
        return "flash attention on CPU, one image at a time"
    heads = probe.transpose(0, 1)[None]
    params = torch.backends.cuda.SDPAParams(heads, heads, heads, None, 0.0, False, False)
    is_flash = torch.backends.cuda.can_use_flash_attention(params)
    return f"{'flash' if is_flash else 'memory-efficient'} attention, one image at a time"


def _one_image(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, H, n, d] each, views
    try:
        with sdpa_kernel(BACKENDS[q.device.type]):
            out = F.scaled_dot_product_attention(q, k, v)
    except RuntimeError as error:
        if not str(error).startswith(("No available kernel", "No viable backend")):
            raise
        raise AttentionError(
            f"no flash or memory-efficient attention for {q.dtype}, head size {q.shape[-1]}, on {q.device}: {error}"
        ) from error
    return out[0].transpose(0, 1)  # [n, H, d], again a view: the kernel writes it in this order


def _has_varlen(q: Tensor) -> bool:
    """Flash attention over packed sequences: CUDA from compute capability 8.0, half types, head sizes 8, 16 ... 256."""
    return (
        q.is_cuda
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.shape[-1] % 8 == 0
        and q.shape[-1] <= 256
        and torch.cuda.get_device_capability(q.device) >= (8, 0)
    )


def _varlen(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415  (CUDA only)

    longest = max(sequences.lengths)
    out = varlen_attn(q, k, v, sequences.cu_seqlens, sequences.cu_seqlens, longest, longest)
    assert isinstance(out, Tensor)  # a tuple only when log-sum-exps are asked for
    return out
