"""How fast this machine multiplies matrices of a block's four shapes: what a tower's rate is held against."""

import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from tp.spec import EncoderSpec

Product = Callable[[Tensor, Tensor], Tensor]


def product_rates(
    spec: EncoderSpec, *, num_patches: int, dtype: torch.dtype, device: torch.device, seconds: float
) -> dict[str, float]:
    """FLOP/s of [N, in] x [in, out] for each linear of an unsharded block, by the faster way, `seconds` for each."""
    shapes = {
        "wqkv": (spec.hidden_size, 3 * spec.qkv_size),
        "wo": (spec.qkv_size, spec.hidden_size),
        "fc0": (spec.hidden_size, spec.mlp_size),
        "fc1": (spec.mlp_size, spec.hidden_size),
    }
    rates = {}
    for name, (inner, outer) in shapes.items():
        x = torch.randn(num_patches, inner, device=device).to(dtype)
        weight = torch.randn(outer, inner, device=device).to(dtype)
        times_s = [_seconds_of(product, x, weight, seconds) for product in _products(dtype, device)]
        rates[name] = 2 * num_patches * inner * outer / min(times_s)
    return rates


def _products(dtype: torch.dtype, device: torch.device) -> Iterator[Product]:
    """F.linear, and oneDNN itself where F.linear leaves float32 to another library."""
    yield F.linear
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if device.type == "cpu" and dtype == torch.float32 and has_onednn:
        yield lambda x, weight: torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def _seconds_of(product: Product, x: Tensor, weight: Tensor, seconds: float) -> float:
    """Of one product, on average over as many as fit, after one that does not count."""
    product(x, weight)
    _wait_for(x.device)
    started_s = time.perf_counter()
    count, elapsed_s = 0, 0.0
    while elapsed_s < seconds:
        product(x, weight)
        _wait_for(x.device)
        count, elapsed_s = count + 1, time.perf_counter() - started_s
    return elapsed_s / count


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
