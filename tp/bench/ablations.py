"""The encoder's kernels with one improvement left out, to time what each of them gives. Called by tp/bench/rank.py."""

import torch
from torch import Tensor

from tp.attention import Sequences, attend_by_image, attend_in_runs, describe_by_image
from tp.bench.messages import KernelSet
from tp.kernels import STOCK, Gelu, Kernels, OneDNNKernels
from tp.memory import FEWEST_QUERIES


class _Stock(Kernels):
    """Stock torch as it is called most often: attention takes one image at a time on a GPU too."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences) -> Tensor:
        return attend_by_image(q, k, v, sequences)

    def describe(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
        return describe_by_image(device, dtype, head_dim)


class _StockLinears(OneDNNKernels):
    """Attention in oneDNN's products, linears and GELU as stock torch has them."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, gelu: Gelu | None = None) -> Tensor:
        return STOCK.linear(x, weight, bias, gelu=gelu)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences) -> Tensor:
        return attend_in_runs(q, k, v, sequences, OneDNNKernels())


class _StockAttention(OneDNNKernels):
    """oneDNN's linears, torch's fused attention."""

    attend = Kernels.attend
    describe = Kernels.describe


class _ShortRuns(OneDNNKernels):
    """Attention of 128 queries at a time, also where several threads share each product."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences) -> Tensor:
        return attend_in_runs(q, k, v, sequences, self, run_of=lambda _: FEWEST_QUERIES)


class _UnpackedKeys(OneDNNKernels):
    """Keys and values in the layout that they have, also where there are many."""

    def prepare(self, weight: Tensor, rows: int) -> Tensor:
        del rows
        return weight.contiguous()


KERNELS: dict[KernelSet, Kernels | None] = {
    "fastest": None,  # whatever `choose_kernels` finds
    "stock": _Stock(),
    "stock-linears": _StockLinears(),
    "stock-attention": _StockAttention(),
    "short-runs": _ShortRuns(),
    "unpacked-keys": _UnpackedKeys(),
}
