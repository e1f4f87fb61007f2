"""How fast this machine multiplies matrices of a block's four shapes: what a tower's rate is held against."""

import time

import torch
from torch import Tensor

from tp.kernels import STOCK, Kernels, choose_kernels
from tp.spec import EncoderSpec

_PRODUCTS_PER_WAIT = {"cpu": 1, "cuda": 100}  # waiting for a GPU takes as long as a small product


def product_rates(
    spec: EncoderSpec, *, num_patches: int, dtype: torch.dtype, device: torch.device, seconds: float
) -> dict[str, float]:
    """FLOP/s of [N, in] x [in, out] for each linear of an unsharded block, over `seconds` for each.

    By stock torch or by what the encoder takes in its place, whichever is faster: in float32 the two differ by far.
    """
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
        times_s = [_seconds_of(kernels, x, weight, seconds) for kernels in {STOCK, choose_kernels(device, dtype)}]
        rates[name] = 2 * num_patches * inner * outer / min(times_s)
    return rates


def _seconds_of(kernels: Kernels, x: Tensor, weight: Tensor, seconds: float) -> float:
    """Of one product, on average over as many as fit, after one that does not count."""
    kernels.linear(x, weight)
    _wait_for(x.device)
    started_s = time.perf_counter()
    count, elapsed_s = 0, 0.0
    while elapsed_s < seconds:
        for _ in range(_PRODUCTS_PER_WAIT[x.device.type]):
            kernels.linear(x, weight)
        _wait_for(x.device)
        count, elapsed_s = count + _PRODUCTS_PER_WAIT[x.device.type], time.perf_counter() - started_s
    return elapsed_s / count


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
