import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from tp.attention import AttentionError, Sequences, _varlen, attend, describe_kernel

CPU = torch.device("cpu")


def random_qkv(length: int, heads: int, size: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """[N, 3, H, d], as the model packs them."""
    qkv = torch.randn(length, 3, heads, size, generator=torch.Generator().manual_seed(1))
    qkv[:, 0] *= size**-0.5
    return qkv.to(device, dtype)


def materialised(qkv: Tensor) -> Tensor:
    q, k, v = qkv.double().cpu().transpose(0, 2).unbind(1)  # [H, N, d]
    return ((q @ k.transpose(1, 2)).softmax(-1) @ v).transpose(0, 1)


@pytest.mark.parametrize("size", [4, 8, 72, 128])
def test_one_image(size: int) -> None:
    qkv = random_qkv(50, 3, size)
    out = attend(*qkv.unbind(1), Sequences.of([50], CPU))
    torch.testing.assert_close(out, materialised(qkv).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_images_do_not_see_each_other(dtype: torch.dtype) -> None:
    qkv = random_qkv(24, 3, 8, dtype)
    alone = [attend(*part.unbind(1), Sequences.of([len(part)], CPU)) for part in qkv.clone().split([4, 12, 8])]
    packed = attend(*qkv.unbind(1), Sequences.of([4, 12, 8], CPU))
    torch.testing.assert_close(packed, torch.cat(alone))


def test_offsets_are_cumulative() -> None:
    sequences = Sequences.of([4, 12, 8], CPU)
    assert sequences.cu_seqlens.tolist() == [0, 4, 16, 24]
    assert sequences.cu_seqlens.dtype == torch.int32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [4, 72, 128])
def test_cpu_takes_the_flash_kernel(dtype: torch.dtype, size: int) -> None:
    qkv = random_qkv(100, 2, size, dtype)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        attend(*qkv.unbind(1), Sequences.of([64, 36], CPU))
    kernels = {event.key for event in profiled.key_averages() if "scaled_dot_product" in event.key}
    assert kernels == {"aten::scaled_dot_product_attention", "aten::_scaled_dot_product_flash_attention_for_cpu"}


@pytest.mark.filterwarnings("ignore:.*Got Query dtype:UserWarning", "ignore:Flash attention kernel:UserWarning")
def test_no_lean_kernel_is_an_error() -> None:
    qkv = random_qkv(8, 2, 8).int()
    with pytest.raises(AttentionError, match=r"no flash or memory-efficient attention for torch.int32, head size 8"):
        attend(*qkv.unbind(1), Sequences.of([8], CPU))


def test_the_operator_over_packed_images_takes_what_it_is_called_with() -> None:
    """Its kernel is for GPUs alone; its signature and shapes are not."""
    q, k, v = random_qkv(24, 3, 8, torch.bfloat16, "meta").unbind(1)
    out = _varlen(q, k, v, Sequences.of([4, 20], torch.device("meta")))
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    assert out.is_contiguous()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [4, 8, 72, 128])
def test_cuda_equals_materialised(dtype: torch.dtype, size: int) -> None:
    qkv = random_qkv(1000, 3, size, dtype, "cuda")
    expected = torch.cat([materialised(part) for part in qkv.split([4, 396, 600])])
    out = attend(*qkv.unbind(1), Sequences.of([4, 396, 600], qkv.device))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.double().cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
def test_cuda_keeps_no_scores() -> None:
    qkv = random_qkv(32768, 1, 64, torch.bfloat16, "cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attend(*qkv.unbind(1), Sequences.of([32768], qkv.device))
    assert torch.cuda.max_memory_allocated() - before < 32768 * 32768 // 8


def test_the_kernel_is_named() -> None:
    assert describe_kernel(CPU, torch.float32, 72) == "flash attention on CPU, one image at a time"
    assert describe_kernel(CPU, torch.bfloat16, 128).startswith("flash")


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.bfloat16, 128), (torch.bfloat16, 72), (torch.float32, 128)])
def test_the_kernel_on_cuda_is_named(dtype: torch.dtype, head_dim: int) -> None:
    named = describe_kernel(torch.device("cuda"), dtype, head_dim)
    assert named.startswith("flash" if dtype == torch.bfloat16 else "memory-efficient")
