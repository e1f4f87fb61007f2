import torch

from tp.bench.allocated import peak_allocated_bytes


def test_the_peak_is_what_tensors_hold_at_once() -> None:
    def work() -> None:
        first = torch.zeros(1_000_000)
        second = first + 1  # 8 MB with the first
        del first
        second.mul_(2)

    peak_bytes = peak_allocated_bytes(work, torch.device("cpu"))
    assert 8_000_000 <= peak_bytes < 8_001_000  # scalars are tensors too
