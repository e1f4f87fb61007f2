import pytest
import torch

from tp.bench import products
from tp.bench.products import product_rates
from tp.kernels import STOCK, Kernels, OneDNNKernels
from tp.spec import PUBLISHED_K3

CPU = torch.device("cpu")


def test_rates_are_of_the_four_products_of_a_block() -> None:
    rates = product_rates(PUBLISHED_K3, num_patches=8, dtype=torch.bfloat16, device=CPU, seconds=0.001)
    assert set(rates) == {"wqkv", "wo", "fc0", "fc1"}
    assert all(rate > 0 for rate in rates.values())


def test_flops_over_seconds_of_the_faster_way(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {STOCK: 1.0}  # everything else takes 2
    monkeypatch.setattr(products, "_seconds_of", lambda kernels, x, weight, seconds_: seconds.get(kernels, 2.0))
    rates = product_rates(PUBLISHED_K3, num_patches=8, dtype=torch.float32, device=CPU, seconds=1)
    assert rates == {
        "wqkv": 2 * 8 * 1024 * 4608,
        "wo": 2 * 8 * 1536 * 1024,
        "fc0": 2 * 8 * 1024 * 4096,
        "fc1": 2 * 8 * 4096 * 1024,
    }


def test_both_stock_torch_and_the_encoders_own_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    monkeypatch.setattr(products, "_seconds_of", lambda kernels, x, weight, seconds: tried.append(kernels) or 1.0)
    product_rates(PUBLISHED_K3, num_patches=8, dtype=torch.float32, device=CPU, seconds=1)
    assert {type(kernels) for kernels in tried} == {Kernels, OneDNNKernels}


def test_without_onednn_there_is_one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "choose_kernels", lambda device, dtype: STOCK)
    rates = product_rates(PUBLISHED_K3, num_patches=8, dtype=torch.float32, device=CPU, seconds=0.001)
    assert all(rate > 0 for rate in rates.values())
