"""What is left out of the kernels for a benchmark changes their speed alone."""

from typing import get_args

import pytest
import torch
from torch import Tensor

from tp.attention import Sequences
from tp.bench.ablations import KERNELS
from tp.bench.messages import KernelSet
from tp.kernels import STOCK, Gelu, Kernels

CPU = torch.device("cpu")
ABLATED = [pytest.param(kernels, id=name) for name, kernels in KERNELS.items() if kernels is not None]


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def test_every_set_has_its_kernels() -> None:
    assert set(KERNELS) == set(get_args(KernelSet))


@pytest.mark.parametrize("kernels", ABLATED)
@pytest.mark.parametrize("gelu", [None, "none", "tanh"])
def test_linears_equal_stock_torchs(kernels: Kernels, gelu: Gelu | None) -> None:
    x, weight, bias = randn(40, 64), randn(96, 64) / 8, randn(96)
    torch.testing.assert_close(
        kernels.linear(x, weight, bias, gelu=gelu), STOCK.linear(x, weight, bias, gelu=gelu), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("kernels", ABLATED)
def test_attention_equals_stock_torchs(kernels: Kernels) -> None:
    lengths = [12, 2304]  # the second one has so many keys that they are packed
    sequences = Sequences.of(lengths, CPU)
    qkv = randn(sum(lengths), 3, 2, 8)
    expected = STOCK.attend(*qkv.clone().unbind(1), sequences)
    torch.testing.assert_close(kernels.attend(*qkv.unbind(1), sequences), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "has_stock_linears", "has_stock_attention"),
    [("stock", True, True), ("stock-linears", True, False), ("stock-attention", False, True)],
)
def test_just_what_is_named_is_left_out(
    name: KernelSet, has_stock_linears: bool, has_stock_attention: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []
    monkeypatch.setattr("tp.kernels.F.linear", lambda *_: called.append("linear") or randn(4, 4))
    for attend in ("tp.kernels.attend", "tp.bench.ablations.attend_by_image"):
        monkeypatch.setattr(attend, lambda *_: called.append("attend"))
    kernels = KERNELS[name]
    assert kernels is not None
    kernels.linear(randn(4, 4), randn(4, 4))
    kernels.attend(*randn(4, 3, 1, 8).unbind(1), Sequences.of([4], CPU))
    assert called == ["linear"] * has_stock_linears + ["attend"] * has_stock_attention
