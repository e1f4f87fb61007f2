"""Kernels other than stock torch's against stock torch and against float64, and what happens where they do not work."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from tp.attention import Sequences
from tp.kernels import STOCK, FusedGeluKernels, Gelu, Kernels, OneDNNKernels, choose_kernels
from tp.memory import MOST_QUERIES

CPU = torch.device("cpu")
ONEDNN = OneDNNKernels()


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("gelu", [None, "none", "tanh"])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 4, 4), (7, 588, 96), (300, 1024, 640)])
def test_linear_equals_float64(shape: tuple[int, int, int], has_bias: bool, gelu: Gelu | None) -> None:
    rows, wide, out = shape
    x, weight = randn(rows, wide), randn(out, wide, seed=2) / wide**0.5
    bias = randn(out, seed=3) if has_bias else None
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    expected = expected if gelu is None else F.gelu(expected, approximate=gelu)
    torch.testing.assert_close(ONEDNN.linear(x, weight, bias, gelu=gelu), expected.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 588, 96), (2, 5, 64, 32)])
def test_the_fused_gelu_equals_float64(shape: tuple[int, ...], has_bias: bool, device: str) -> None:
    *rows, wide, out = shape
    x, weight = randn(*rows, wide), randn(out, wide, seed=2) / wide**0.5
    bias = randn(out, seed=3) if has_bias else None
    expected = F.gelu(
        F.linear(x.double(), weight.double(), None if bias is None else bias.double()), approximate="tanh"
    )
    found = FusedGeluKernels().linear(
        x.to(device), weight.to(device), None if bias is None else bias.to(device), gelu="tanh"
    )
    tolerance = 1e-5 if device == "cuda" else 5e-4  # on a CPU the operator's GELU is the exact one
    torch.testing.assert_close(found.cpu(), expected.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[4], [MOST_QUERIES + 8], [4, 12, 8], [2 * MOST_QUERIES], [2304]])
@pytest.mark.parametrize("size", [4, 72, 128])
def test_attention_equals_float64(size: int, lengths: list[int], dtype: torch.dtype) -> None:
    qkv = randn(sum(lengths), 3, 2, size, dtype=dtype)
    qkv[:, 0] *= size**-0.5
    sequences = Sequences.of(lengths, CPU)
    expected = STOCK.attend(*qkv.double().unbind(1), sequences)
    found = ONEDNN.attend(*qkv.unbind(1), sequences)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


def test_large_scores_stay_finite() -> None:
    qkv = 1e4 * randn(64, 3, 1, 8)
    found = ONEDNN.attend(*qkv.unbind(1), Sequences.of([64], CPU))
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found, STOCK.attend(*qkv.unbind(1), Sequences.of([64], CPU)))


def test_a_nan_stays_with_its_image() -> None:
    qkv = randn(24, 3, 2, 8)
    qkv[5] = torch.nan
    found = ONEDNN.attend(*qkv.unbind(1), Sequences.of([4, 12, 8], CPU))
    assert found.isnan().flatten(1).any(1).tolist() == [4 <= row < 16 for row in range(24)]


def test_chosen_where_it_works() -> None:
    assert isinstance(choose_kernels(CPU, torch.float32), OneDNNKernels)
    assert choose_kernels(CPU, torch.float64) is STOCK  # oneDNN has no such product


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_fused_gelu_is_chosen_on_a_gpu(dtype: torch.dtype) -> None:
    assert isinstance(choose_kernels(torch.device("cuda"), dtype), FusedGeluKernels)


@pytest.mark.parametrize("fault", ["missing", "wrong"])
def test_stock_torch_where_it_does_not(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def linear(self: Kernels, x: Tensor, weight: Tensor, bias: Tensor | None = None, **_: object) -> Tensor:
        if fault == "missing":
            raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_linear_pointwise'")
        return 2 * F.linear(x, weight, bias)

    monkeypatch.setattr(OneDNNKernels, "linear", linear)
    assert choose_kernels(CPU, torch.float32) is STOCK
