import pytest
import torch

from tp.bench import products
from tp.bench.products import product_rates
from tp.spec import PUBLISHED_K3

CPU = torch.device("cpu")


def test_rates_are_of_the_four_products_of_a_block() -> None:
    rates = product_rates(PUBLISHED_K3, num_patches=8, dtype=torch.bfloat16, device=CPU, seconds=0.001)
    assert set(rates) == {"wqkv", "wo", "fc0", "fc1"}
    assert all(rate > 0 for rate in rates.values())


def test_flops_over_seconds_of_the_faster_way(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([2.0, 1.0] * 4)
    monkeypatch.setattr(products, "_products", lambda dtype, device: ["one", "other"])
    monkeypatch.setattr(products, "_seconds_of", lambda product, x, weight, seconds_: next(seconds))
    rates = product_rates(PUBLISHED_K3, num_patches=8, dtype=torch.float32, device=CPU, seconds=1)
    assert rates == {
        "wqkv": 2 * 8 * 1024 * 4608,
        "wo": 2 * 8 * 1536 * 1024,
        "fc0": 2 * 8 * 1024 * 4096,
        "fc1": 2 * 8 * 4096 * 1024,
    }


def test_in_float32_onednn_is_tried_too_and_agrees() -> None:
    ways = list(products._products(torch.float32, CPU))
    assert len(ways) == 2
    x, weight = torch.randn(64, 48), torch.randn(32, 48)
    torch.testing.assert_close(ways[0](x, weight), ways[1](x, weight), rtol=1e-5, atol=1e-4)


def test_without_onednn_there_is_one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert len(list(products._products(torch.float32, CPU))) == 1
