"""Full attention inside each packed image, two ways: torch's fused kernels, and products over runs of queries.

Shapes: q, k, v [N, H, d] with N packed patches, H heads of this rank, d the head size; q comes scaled by 1 / sqrt(d).
Neither way holds an [n, n] matrix of a large image: a kernel that would is refused, not fallen back to. Called by
tp/kernels.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

from tp.memory import query_run
from tp.streams import to_device

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
        return cls(tuple(lengths), to_device(torch.tensor(offsets, dtype=torch.int32), device))

    @property
    def rows(self) -> list[slice]:
        """Where each image lies among the packed rows."""
        return [slice(stop - length, stop) for length, stop in zip(self.lengths, accumulate(self.lengths), strict=True)]


class Products(Protocol):
    """Matrix products on a CPU."""

    def prepare(self, weight: Tensor, rows: int) -> Tensor:
        """The weight [out, in] in the layout that products with `rows` rows want, for several of them."""
        ...

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x W^T."""
        ...


def attend(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences) -> Tensor:
    """Attention of every patch to the patches of its own image: [N, H, d], by torch's fused kernels.

    q's memory may be reused for the result. Raises AttentionError where only a materialising kernel would do.
    """
    if takes_packed_images(q.device, q.dtype, q.shape[-1]):
        return _varlen(q, k, v, sequences)
    return attend_by_image(q, k, v, sequences)


def attend_by_image(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences) -> Tensor:
    """The same by torch's scaled dot product attention, one image after the other."""
    if len(sequences.lengths) == 1:
        return _one_image(q, k, v)
    for rows in sequences.rows:
        q[rows] = _one_image(q[rows], k[rows], v[rows])
    return q


def attend_in_runs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: Sequences,
    products: Products,
    *,
    run_of: Callable[[int], int] | None = None,
) -> Tensor:
    """The same by matrix products: per image and head, the scores of `run_of(n)` queries at a time (`query_run`'s).

    A large product runs nearer to a CPU's peak than the tiles of a fused kernel; where its scores leave the caches, the
    softmax is what takes long. Scores are rounded to q's dtype (as in the published modelling code); the softmax is
    float32 inside and subtracts the maximum.
    """
    run_of = run_of or partial(query_run, threads=torch.get_num_threads())
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for rows, length in zip(sequences.rows, sequences.lengths, strict=True):
        for head in range(q.shape[1]):
            _one_head(q[rows, head], k[rows, head], v[rows, head], products, run_of(length), out=out[rows, head])
    return out


def _one_head(q: Tensor, k: Tensor, v: Tensor, products: Products, size: int, *, out: Tensor) -> None:
    """Of [n, d] each; scores [size, n] live for one run at a time."""
    keys, values = products.prepare(k, size), products.prepare(v.t(), size)
    for run, result in zip(torch.split(q, size), torch.split(out, size), strict=True):
        result.copy_(products.linear(_softmax_(products.linear(run, keys)), values))


def _softmax_(scores: Tensor) -> Tensor:
    return torch.softmax(scores, -1, out=scores)


@cache
def takes_packed_images(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Flash attention over packed sequences: CUDA from compute capability 8.0, half types, head sizes 8, 16 ... 256."""
    return (
        device.type == "cuda"
        and dtype in (torch.float16, torch.bfloat16)
        and head_dim % 8 == 0
        and head_dim <= 256
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def describe_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Which kernel `attend` uses for such tensors, in words for a person."""
    if takes_packed_images(device, dtype, head_dim):
        return "flash attention, packed images in one call"
    return describe_by_image(device, dtype, head_dim)


def describe_by_image(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Which kernel `attend_by_image` uses."""
    if device.type == "cpu":
        return "flash attention on CPU, one image at a time"
    heads = torch.empty(1, 1, 1, head_dim, dtype=dtype, device=device)
    params = torch.backends.cuda.SDPAParams(heads, heads, heads, None, 0.0, False, False)
    is_flash = torch.backends.cuda.can_use_flash_attention(params)
    return f"{'flash' if is_flash else 'memory-efficient'} attention, one image at a time"


def _one_image(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, H, n, d] each, views
    try:
        with sdpa_kernel(BACKENDS[q.device.type]):
            out = F.scaled_dot_product_attention(q, k, v, scale=1.0)
    except RuntimeError as error:
        if not str(error).startswith(("No available kernel", "No viable backend")):
            raise
        raise AttentionError(
            f"no flash or memory-efficient attention for {q.dtype}, head size {q.shape[-1]}, on {q.device}: {error}"
        ) from error
    return out[0].transpose(0, 1)  # [n, H, d], again a view: the kernel writes it in this order


def _varlen(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences) -> Tensor:
    """`torch.nn.attention.varlen.varlen_attn` less its operator in Python and a kernel that fills an unused tensor."""
    longest, offsets = max(sequences.lengths), sequences.cu_seqlens
    out: Tensor = torch.ops.aten._flash_attention_forward.default(
        q, k, v, offsets, offsets, longest, longest, 0.0, False, False, scale=1.0
    )[0]
    return out
