"""The heavy operations of the encoder behind one small interface: stock torch, and what is faster where it works.

Shapes: x [..., in], weight [out, in], bias [out]; q, k, v [N, H, d] as in tp/attention.py; rotation [N, d / 2] complex.
`choose_kernels` picks by device and by trial, so that a torch without the operator, or a CPU without the instructions,
falls back to what works. Called by tp/model.py and tp/parallel.py.
"""

import logging
from collections.abc import Callable
from functools import cache
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from tp.attention import Sequences, attend, attend_in_runs, describe_kernel
from tp.positions import rotate_
from tp.streams import to_device

log = logging.getLogger("tpvision.kernels")

_PACKED_FROM = 2048  # keys from which packing them once costs less than in each run's product (measured: 1,024 loses)

Gelu = Literal["none", "tanh"]  # the exact one, and its tanh approximation, as torch names them


class Kernels:
    """Stock torch: linears, GELU, and its fused attention kernels."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, gelu: Gelu | None = None) -> Tensor:
        """x W^T + b, then GELU where one is named: [..., out]."""
        y = F.linear(x, weight, bias)
        return y if gelu is None else F.gelu(y, approximate=gelu)

    def add_linear_(self, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        """x += y W^T + b, in place on x [N, out]."""
        product = self.linear(y, weight)
        x += product if bias is None else product.add_(bias)

    def rotate(self, qk: Tensor, rotation: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
        """Rotary embedding of q and k, q times `scale` too: [N, 2, H, d] -> [N, H, d] each. May overwrite qk."""
        q, k = qk.unbind(1)
        rotate_(q, rotation, scale=scale)
        rotate_(k, rotation)
        return q, k

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences) -> Tensor:
        """Attention of every patch to the patches of its own image, q scaled beforehand: [N, H, d]."""
        return attend(q, k, v, sequences)

    def describe(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
        """In words for a person."""
        return describe_kernel(device, dtype, head_dim)


class OneDNNKernels(Kernels):
    """CPU: oneDNN's product with GELU fused into it, and attention out of such products.

    In float32, `F.linear` goes to MKL instead, on some CPUs at half oneDNN's rate; torch's fused attention runs far
    below the rate of a product. The operator is private to torch (its compiler emits it).
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


class FusedLinearKernels(Kernels):
    """CUDA: the tanh GELU and sums inside the product, in place of a pass of their own over memory.

    cuBLASLt fuses the GELU only where a bias is added; zeros stand in for one. The operator is private to torch.
    """

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, gelu: Gelu | None = None) -> Tensor:
        """x W^T + b, then GELU where one is named: [..., out]."""
        if gelu != "tanh":
            return super().linear(x, weight, bias, gelu=gelu)
        bias = _zeros(weight.shape[0], weight.dtype, weight.device) if bias is None else bias
        y: Tensor = torch._addmm_activation(bias, x.flatten(0, -2), weight.t(), use_gelu=True)
        return y.view(*x.shape[:-1], -1)

    def add_linear_(self, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        """x += y W^T + b, in place on x [N, out]: the product and what it is added to are rounded once."""
        x.addmm_(y, weight.t())
        if bias is not None:
            x += bias


class FusedRotaryKernels(FusedLinearKernels):
    """CUDA in bfloat16: the rotary embedding of q and k in one pass over them, in place of eight, some in float32.

    torch's jiterator compiles it when it is first used, with the compiler that comes with torch. It takes one dtype and
    makes one output, so a pair of channels goes in as the 32 bits that it has in memory, and floats as theirs.
    """

    def rotate(self, qk: Tensor, rotation: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
        """Rotary embedding of q and k, q times `scale` too: [N, 2, H, d] -> [N, H, d] each, in memory of their own."""
        turns = torch.view_as_real(rotation).view(torch.int32)[:, None, None]  # [N, 1, 1, d / 2, 2]
        scales = _scales(scale, qk.device)[:, None, None]  # [2, 1, 1]
        pairs = _rotary_kernel()(qk.view(torch.int32), turns[..., 0], turns[..., 1], scales)  # [N, 2, H, d / 2]
        q, k = pairs.view(torch.bfloat16).unbind(1)
        return q, k


ROTATE_PAIR = """
template <typename T> T nearest(T bits) {  // of a float, to bfloat16 in its upper half; ties to even, NaN stays NaN
  return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : bits + 0x7fffu + ((bits >> 16) & 1u);
}
template <typename T> T rotate_pair(T pair, T cosine, T sine, T scale) {
  const unsigned int bits = pair;
  const float x = __uint_as_float(bits << 16), y = __uint_as_float(bits & 0xffff0000u);
  const float c = __int_as_float(cosine) * __int_as_float(scale), s = __int_as_float(sine) * __int_as_float(scale);
  const unsigned int first = __float_as_uint(x * c - y * s), second = __float_as_uint(x * s + y * c);
  return (nearest(first) >> 16) | (nearest(second) & 0xffff0000u);
}
"""

STOCK = Kernels()


def choose_kernels(device: torch.device, dtype: torch.dtype) -> Kernels:
    """The fastest kernels that work here: the first for this kind of device to pass a trial in `dtype`, else STOCK."""
    candidates: list[Kernels] = [OneDNNKernels()] if device.type == "cpu" else [FusedLinearKernels()]
    if device.type == "cuda" and dtype == torch.bfloat16:
        candidates.insert(0, FusedRotaryKernels())
    for kernels in candidates:
        failure = _trial(kernels, device, dtype)
        if failure is None:
            return kernels
        log.info("%s cannot be used in %s: %s", type(kernels).__name__, dtype, failure)
    return STOCK


@cache
def _zeros(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(size, dtype=dtype, device=device)


@cache
def _rotary_kernel() -> Callable[..., Tensor]:
    kernel: Callable[..., Tensor] = torch.cuda.jiterator._create_jit_fn(ROTATE_PAIR)
    return kernel


@cache
def _scales(scale: float, device: torch.device) -> Tensor:
    """The bits of (scale, 1): [2] int32."""
    return to_device(torch.tensor([scale, 1.0], dtype=torch.float32).view(torch.int32), device)


def _trial(kernels: Kernels, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why these kernels cannot be used, or None: they beside stock torch's, on a few numbers.

    A library's GELU may be good enough for half types only.
    """
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2

    def check(found: Tensor, expected: Tensor) -> None:
        # Not torch.testing, whose first comparison imports sympy: half a second of every start.
        if not torch.allclose(found, expected, rtol=tolerance, atol=tolerance):
            raise AssertionError("its results are wrong")

    generator = torch.Generator().manual_seed(0)
    shapes = ((8, 64), (48, 64), (48,))
    x, weight, bias = (torch.randn(*shape, generator=generator).to(device, dtype) / 4 for shape in shapes)
    gelus: tuple[Gelu | None, ...] = (None, "none", "tanh")
    qkv = torch.randn(4, 3, 2, 8, generator=generator).to(device, dtype)
    heads = torch.randn(_PACKED_FROM + 4, 1, 64, generator=generator).to(device, dtype) / 8  # q, k and v, of one head
    sequences = Sequences.of([_PACKED_FROM, 4], device)
    rotation = torch.polar(torch.ones(4, 4), torch.rand(4, 4, generator=generator)).to(device)
    try:
        for gelu in gelus:
            for shift in (bias, None):
                expected = STOCK.linear(x, weight, shift, gelu=gelu)
                check(kernels.linear(x, weight, shift, gelu=gelu), expected)
        for shift in (bias, None):
            sums = torch.ones(2, 8, 48, dtype=dtype, device=device)
            STOCK.add_linear_(sums[0], x, weight, shift)
            kernels.add_linear_(sums[1], x, weight, shift)
            check(sums[1], sums[0])
        attended = STOCK.attend(heads.clone(), heads, heads, sequences)
        check(kernels.attend(heads.clone(), heads, heads, sequences), attended)
        turned = STOCK.rotate(qkv.clone()[:, :2], rotation, scale=0.5)
        for found, expected in zip(kernels.rotate(qkv[:, :2], rotation, scale=0.5), turned, strict=True):
            check(found, expected)
    except (AttributeError, RuntimeError, AssertionError) as error:
        return str(error)
    return None
