"""The heavy operations of the encoder behind one small interface: stock torch, and what is faster where it works.

Shapes: x [..., in], weight [out, in], bias [out]; q, k, v [N, H, d] as in tp/attention.py. `choose_kernels` picks by
device and by trial, so that a torch without the operator, or a CPU without the instructions, falls back to STOCK.
Called by tp/model.py and tp/parallel.py.
"""

import logging
from functools import cache
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from tp.attention import Sequences, attend, attend_in_runs, describe_kernel

log = logging.getLogger("tpvision.kernels")

_PACKED_FROM = 2048  # keys from which packing them once costs less than in each run's product (measured: 1,024 loses)

Gelu = Literal["none", "tanh"]  # the exact one, and its tanh approximation, as torch names them


class Kernels:
    """Stock torch: linears, GELU, and its fused attention kernels."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, gelu: Gelu | None = None) -> Tensor:
        """x W^T + b, then GELU where one is named: [..., out]."""
        y = F.linear(x, weight, bias)
        return y if gelu is None else F.gelu(y, approximate=gelu)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences) -> Tensor:
        """Attention of every patch to the patches of its own image, q scaled beforehand: [N, H, d]."""
        return attend(q, k, v, sequences)

    def describe(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
        """In words for a person."""
        return describe_kernel(device, dtype, head_dim)


class OneDNNKernels(Kernels):
    """CPU: oneDNN's product with GELU fused into it, and attention out of such products.

    In float32, `F.linear` goes to MKL instead, at half oneDNN's rate or less on AMD; torch's fused attention runs far
    below the rate of a product in every dtype. The operator is private to torch (its compiler emits it).
    """

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, gelu: Gelu | None = None) -> Tensor:
        """x W^T + b, then GELU where one is named: [..., out]."""
        after = "none" if gelu is None else "gelu"
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, after, [], gelu or "")
        return y

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences) -> Tensor:
        """Attention of every patch to the patches of its own image, q scaled beforehand: [N, H, d]."""
        return attend_in_runs(q, k, v, sequences, self)

    def prepare(self, weight: Tensor, rows: int) -> Tensor:
        """The weight [out, in] in the layout that products with `rows` rows want, for several of them."""
        weight = weight.contiguous()
        if max(weight.shape) < _PACKED_FROM:
            return weight
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
        return packed

    def describe(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
        """In words for a person."""
        del device, dtype, head_dim
        return "oneDNN products over runs of queries, one image and head at a time"


class FusedGeluKernels(Kernels):
    """CUDA: the tanh GELU inside the product (an epilogue of cuBLASLt), in place of a pass of its own over memory.

    cuBLASLt fuses it only where a bias is added; zeros stand in for one. The operator is private to torch.
    """

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, gelu: Gelu | None = None) -> Tensor:
        """x W^T + b, then GELU where one is named: [..., out]."""
        if gelu != "tanh":
            return super().linear(x, weight, bias, gelu=gelu)
        bias = _zeros(weight.shape[0], weight.dtype, weight.device) if bias is None else bias
        y: Tensor = torch._addmm_activation(bias, x.flatten(0, -2), weight.t(), use_gelu=True)
        return y.view(*x.shape[:-1], -1)


STOCK = Kernels()


def choose_kernels(device: torch.device, dtype: torch.dtype) -> Kernels:
    """The fastest kernels that work here: those for this kind of device if they pass a trial in `dtype`, else STOCK."""
    kernels = OneDNNKernels() if device.type == "cpu" else FusedGeluKernels()
    failure = _trial(kernels, device, dtype)
    if failure is None:
        return kernels
    log.info("%s cannot be used in %s, stock torch is: %s", type(kernels).__name__, dtype, failure)
    return STOCK


@cache
def _zeros(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(size, dtype=dtype, device=device)


def _trial(kernels: Kernels, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why these kernels cannot be used, or None: their linears beside stock torch's, on a few numbers."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((8, 64), (48, 64), (48,))
    x, weight, bias = (torch.randn(*shape, generator=generator).to(device, dtype) / 4 for shape in shapes)
    gelus: tuple[Gelu | None, ...] = (None, "none", "tanh")
    try:
        for gelu in gelus:
            for shift in (bias, None):
                expected = STOCK.linear(x, weight, shift, gelu=gelu)
                torch.testing.assert_close(kernels.linear(x, weight, shift, gelu=gelu), expected, rtol=2e-2, atol=2e-2)
    except (AttributeError, RuntimeError, AssertionError) as error:
        return str(error)
    return None
