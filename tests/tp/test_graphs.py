"""CUDA graphs: for a lone image, a few and many, and what is left of a capture that fails."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from goldens import GOLDEN, spec_of
from torch import Tensor

from tp.attention import Sequences
from tp.graphs import fills
from tp.kernels import FusedRotaryKernels, Kernels
from tp.parallel import TPGroup
from tp.runner import Bytes, EncodeReport, Runner
from tp.spec import Grid

TIERS = (256, 1024)


class WaitingKernels(FusedRotaryKernels):
    """They wait for the device in the middle of a forward, which no capture can have."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences) -> Tensor:
        torch.cuda.synchronize()
        return super().attend(q, k, v, sequences)


def load(kernels: Kernels | None = None) -> Runner:
    group = TPGroup.single("cuda")
    return Runner.load(GOLDEN / "tiny-k3-bf16", spec_of("tiny-k3"), dtype="bfloat16", group=group, kernels=kernels)


def encode(runner: Runner, grids: Sequence[Grid]) -> tuple[EncodeReport, list[Bytes]]:
    generator, token_bytes = np.random.default_rng(0), 2 * runner.spec.text_hidden_size
    pixels = [generator.integers(0, 256, (grid.num_patches, 588), np.uint8) for grid in grids]
    outputs = [np.zeros((grid.num_tokens, token_bytes), np.uint8) for grid in grids]
    return runner.encode(grids, pixels, outputs), outputs


def values(outputs: Sequence[Bytes]) -> Tensor:
    return torch.cat([torch.from_numpy(output).view(torch.bfloat16).float() for output in outputs])


@pytest.mark.parametrize(
    ("num_patches", "tier", "world_size", "expected"),
    [
        (4, 1024, 1, True),
        (1024, 1024, 1, True),
        (1028, 1024, 1, False),
        (3068, 4096, 1, False),
        (3072, 4096, 1, True),
        (4100, 4096, 1, False),
        (1028, 4096, 3, False),
        (1028, 4096, 4, True),
    ],
)
def test_a_large_tier_is_not_padded_by_more_than_a_quarter(
    num_patches: int, tier: int, world_size: int, expected: bool
) -> None:
    assert fills(num_patches, tier, world_size) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 2, 8, 9, 64])
@pytest.mark.parametrize("side", [2, 4])
def test_a_graph_gives_the_eager_tokens_for_any_number_of_images(count: int, side: int) -> None:
    runner = load()
    grids = [Grid(1, side, side)] * count
    report, expected = encode(runner, grids)
    assert not report.is_graphed
    assert runner.capture(TIERS) == TIERS
    report, found = encode(runner, grids)
    assert report.is_graphed
    distance = (values(found) - values(expected)).norm() / values(expected).norm()
    assert float(distance) < 3e-2


@pytest.mark.gpu
def test_a_capture_that_fails_leaves_all_as_it_was() -> None:
    runner = load(WaitingKernels())
    grids = [Grid(1, 4, 4), Grid(1, 8, 4)]
    _, expected = encode(runner, grids)
    stream = torch.cuda.current_stream()
    assert runner.capture(TIERS) == ()
    assert torch.cuda.current_stream() == stream
    torch.cuda.empty_cache()
    report, found = encode(runner, grids)
    assert not report.is_graphed
    assert all(map(np.array_equal, found, expected))
