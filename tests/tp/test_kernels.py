"""Kernels other than stock torch's against stock torch and against float64, and what happens where they do not work."""

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from tp import kernels as module
from tp.attention import Sequences
from tp.kernels import (
    ROTATE_PAIR,
    STOCK,
    FusedLinearKernels,
    FusedRotaryKernels,
    Gelu,
    Kernels,
    OneDNNKernels,
    choose_kernels,
)
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
    found = FusedLinearKernels().linear(
        x.to(device), weight.to(device), None if bias is None else bias.to(device), gelu="tanh"
    )
    tolerance = 1e-3 if device == "cuda" else 5e-4  # cuBLAS may take a quick tanh; on a CPU it is the exact GELU
    torch.testing.assert_close(found.cpu(), expected.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("kernels", "device"),
    [
        pytest.param(STOCK, "cpu", id="stock"),
        pytest.param(ONEDNN, "cpu", id="onednn"),
        pytest.param(FusedLinearKernels(), "cpu", id="fused"),
        pytest.param(FusedLinearKernels(), "cuda", id="fused on cuda", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_product_is_added_in_place(kernels: Kernels, device: str, has_bias: bool) -> None:
    x, y, weight = randn(9, 48), randn(7, 64, seed=2), randn(48, 64, seed=3) / 8
    bias = randn(48, seed=4) if has_bias else None
    expected = x.clone()
    expected[1:8] += F.linear(y, weight, bias)
    found = x.to(device)
    kernels.add_linear_(found[1:8], y.to(device), weight.to(device), None if bias is None else bias.to(device))
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_that_cannot_pack_what_attention_packs_are_not_used(dtype: torch.dtype) -> None:
    class Unpacking(OneDNNKernels):
        def prepare(self, weight: Tensor, rows: int) -> Tensor:
            if super().prepare(weight, rows).layout == torch._mkldnn:  # type: ignore[attr-defined]
                raise RuntimeError("no such operator")
            return weight.contiguous()

    assert module._trial(ONEDNN, CPU, dtype) is None
    assert module._trial(Unpacking(), CPU, dtype) == "no such operator"


def test_a_gelu_that_is_off_by_little_will_not_do_in_float32() -> None:
    fused = FusedLinearKernels()  # its tanh GELU is the exact one on a CPU: off by up to 5e-4
    assert module._trial(fused, CPU, torch.bfloat16) is None
    assert module._trial(fused, CPU, torch.float32) is not None


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
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu_all_that_is_fused_is_chosen(dtype: torch.dtype) -> None:
    kind = FusedRotaryKernels if dtype == torch.bfloat16 else FusedLinearKernels
    assert type(choose_kernels(torch.device("cuda"), dtype)) is kind


CPP = """
#include <cstring>
template <typename To, typename From> To cast(From from) { To to; std::memcpy(&to, &from, 4); return to; }
static float __uint_as_float(unsigned int bits) { return cast<float>(bits); }
static float __int_as_float(int bits) { return cast<float>(bits); }
static unsigned int __float_as_uint(float x) { return cast<unsigned int>(x); }
%s
extern "C" void run(long n, const int* pair, const int* cosine, const int* sine, const int* scale, int* out) {
  for (long i = 0; i < n; ++i) out[i] = rotate_pair<int>(pair[i], cosine[i], sine[i], scale[i]);
}
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Tensor]:
    """The rotary kernel's own source, compiled for the CPU, element by element over tensors that broadcast."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    folder: Path = tmp_path_factory.mktemp("rotary")
    (folder / "rotary.cpp").write_text(CPP % ROTATE_PAIR)
    flags = ["-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", "rotary.so"]
    subprocess.run([compiler, *flags, "rotary.cpp"], cwd=folder, check=True, timeout=60)
    library = ctypes.CDLL(str(folder / "rotary.so"))

    def run(*inputs: Tensor) -> Tensor:
        assert {x.dtype for x in inputs} == {torch.int32}
        spread = [x.contiguous() for x in torch.broadcast_tensors(*inputs)]
        out = torch.empty_like(spread[0])
        library.run(ctypes.c_long(out.numel()), *(ctypes.c_void_p(x.data_ptr()) for x in (*spread, out)))
        return out

    return run


def rotations_of(rows: int, pairs: int) -> Tensor:
    return torch.polar(torch.ones(rows, pairs), 20 * randn(rows, pairs, seed=4))


def test_the_rotary_kernel_turns_pairs_like_stock_torch(
    compiled: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_rotary_kernel", lambda: compiled)
    qkv, rotation = randn(24, 3, 2, 72, dtype=torch.bfloat16), rotations_of(24, 36)
    before = qkv.clone()
    found = FusedRotaryKernels().rotate(qkv[:, :2], rotation, scale=72**-0.5)
    assert torch.equal(qkv, before)
    for mine, expected in zip(found, STOCK.rotate(qkv[:, :2], rotation, scale=72**-0.5), strict=True):
        torch.testing.assert_close(mine, expected, rtol=2**-7, atol=1e-6)  # an ulp, where a float32 differs in its last
        assert (mine == expected).float().mean() > 0.99


def test_the_rotary_kernel_rounds_like_torch(compiled: Callable[..., Tensor]) -> None:
    """Every bfloat16 times numbers that make ties, overflow, subnormals and NaN."""
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    pairs = torch.stack([values, torch.zeros_like(values)], -1).view(torch.int32)  # [65536, 1]
    one, none = (torch.tensor(value).view(torch.int32) for value in (1.0, 0.0))
    for scale in (1.0, 1 + 2**-8, 1 - 2**-9, 3.0, 2.0**-130, -(2.0**100)):
        scaled = compiled(pairs, one, none, torch.tensor(scale).view(torch.int32))
        found = scaled.view(torch.bfloat16).view(-1, 2)[:, 0]
        expected = (values.float() * scale).bfloat16()
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found[~found.isnan()], expected[~found.isnan()])


def test_torch_takes_the_rotary_kernel_for_the_function_that_it_is() -> None:
    assert module._rotary_kernel().kernel_name == "rotate_pair"  # type: ignore[attr-defined]


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [1, 12])
def test_the_rotary_kernel_on_a_gpu_turns_pairs_like_stock_torch(heads: int) -> None:
    qkv, rotation = randn(300, 3, heads, 128, dtype=torch.bfloat16).cuda(), rotations_of(300, 64).cuda()
    found = FusedRotaryKernels().rotate(qkv[:, :2], rotation, scale=128**-0.5)
    for mine, expected in zip(found, STOCK.rotate(qkv[:, :2], rotation, scale=128**-0.5), strict=True):
        torch.testing.assert_close(mine, expected, rtol=2**-7, atol=1e-6)


def test_a_rotary_kernel_that_cannot_be_compiled_is_not_used() -> None:
    assert module._trial(FusedRotaryKernels(), CPU, torch.bfloat16) is not None  # torch compiles it for GPUs alone


@pytest.mark.parametrize("fault", ["missing", "wrong"])
def test_stock_torch_where_it_does_not(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def linear(self: Kernels, x: Tensor, weight: Tensor, bias: Tensor | None = None, **_: object) -> Tensor:
        if fault == "missing":
            raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_linear_pointwise'")
        return 2 * F.linear(x, weight, bias)

    monkeypatch.setattr(OneDNNKernels, "linear", linear)
    assert choose_kernels(CPU, torch.float32) is STOCK
