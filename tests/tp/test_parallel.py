import pytest
import torch
from torch import Tensor

from tp.parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    Shard,
    TokenShare,
    TPGroup,
    share_size,
    split_tokens,
)
from tp.spec import Grid

CPU = torch.device("cpu")


def rank_of(rank: int, world_size: int) -> TPGroup:
    return TPGroup(rank=rank, world_size=world_size, device=CPU)


def fill(layer: ColumnParallelLinear | RowParallelLinear, weight: Tensor, bias: Tensor | None) -> None:
    def part(full: Tensor, shard: Shard | None) -> torch.nn.Parameter:
        pieces = [full] if shard is None else [full.narrow(shard.dim, a, b - a) for a, b in shard.ranges]
        return torch.nn.Parameter(torch.cat(pieces, 0 if shard is None else shard.dim))

    layer.weight = part(weight, layer.shard("weight"))
    layer.bias = None if bias is None else part(bias, layer.shard("bias"))


def test_one_rank_needs_no_process_group() -> None:
    group = TPGroup.single()
    x = torch.ones(1, 2, 3)
    assert group.all_reduce_(x) is x
    assert torch.equal(group.reduce_scatter(x), x[0])
    assert group.all_gather(x[0]) is not None
    group.close()


def test_one_rank_of_torchrun_needs_none_either(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with TPGroup.from_environment(CPU, timeout_s=1) as group:
        assert (group.rank, group.world_size) == (0, 1)
    assert not torch.distributed.is_initialized()


def test_column_parallel_splits_q_k_and_v_separately() -> None:
    # 2 heads of 4 channels, q at 0-8, k at 8-16, v at 16-24: rank 1 has the second head of each
    layer = ColumnParallelLinear(5, 24, parts=3, unit=4, group=rank_of(1, 2), bias=True)
    assert layer.shard("weight") == layer.shard("bias") == Shard(0, ((4, 8), (12, 16), (20, 24)))
    assert layer.weight.shape == (12, 5)


def test_row_parallel_splits_columns_and_keeps_the_bias_whole() -> None:
    layer = RowParallelLinear(4096, 10, unit=8, group=rank_of(1, 3), bias=True)
    assert layer.shard("weight") == Shard(1, ((1360, 2728),))
    assert layer.shard("bias") is None
    assert layer.weight.shape == (10, 1368)


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
def test_column_then_row_sums_to_the_unsplit_product(world_size: int) -> None:
    generator = torch.Generator().manual_seed(1)
    x, up, down = (torch.randn(*size, generator=generator) for size in ((7, 5), (140, 5), (6, 140)))
    bias = torch.randn(140, generator=generator)
    partials = []
    for rank in range(world_size):
        first = ColumnParallelLinear(5, 140, unit=8, group=rank_of(rank, world_size), bias=True)
        second = RowParallelLinear(140, 6, unit=8, group=rank_of(rank, world_size), bias=False)
        fill(first, up, bias)
        fill(second, down, None)
        partials.append(second.partial(first(x).relu()))
    torch.testing.assert_close(sum(partials), (x @ up.T + bias).relu() @ down.T, rtol=1e-5, atol=1e-4)


def test_row_parallel_adds_its_bias_once() -> None:
    layer = RowParallelLinear(2, 3, unit=1, group=TPGroup.single(), bias=True)
    fill(layer, torch.zeros(3, 2), torch.ones(3))
    assert layer.partial(torch.ones(1, 2)).tolist() == [[0, 0, 0]]
    assert layer.reduce_(torch.zeros(1, 3)).tolist() == [[1, 1, 1]]
    assert layer.reduce_scatter(torch.zeros(1, 1, 3)).tolist() == [[1, 1, 1]]


def test_parameters_have_no_storage_before_loading() -> None:
    assert ColumnParallelLinear(2, 4, unit=1, group=TPGroup.single(), bias=True).weight.is_meta


def test_tokens_split_evenly_across_images() -> None:
    # 2 + 6 tokens over 2 ranks: the second rank starts at token 4, row 16
    shares = split_tokens([Grid(1, 2, 4), Grid(1, 4, 6)], 2)
    assert shares == (TokenShare(0, ((2, 1), (2, 1))), TokenShare(16, ((4, 1),)))
    assert [share.rows for share in shares] == [slice(0, 16), slice(16, 32)]


def test_one_token_on_six_ranks_leaves_five_with_padding_only() -> None:
    shares = split_tokens([Grid(1, 2, 2)], 6)
    assert [share.num_tokens for share in shares] == [1, 0, 0, 0, 0, 0]
    assert [share.num_rows for share in shares] == [4, 0, 0, 0, 0, 0]


def test_last_share_is_short() -> None:
    grids = [Grid(1, 2, 10)]  # 5 tokens on 3 ranks: 2, 2, 1
    assert [share.num_tokens for share in split_tokens(grids, 3)] == [2, 2, 1]
    assert share_size(grids, 3) == 2


def test_frames_count_in_rows_not_in_tokens() -> None:
    # 2 tokens of 3 frames, 4 tokens of an image; 3 tokens a rank
    shares = split_tokens([Grid(3, 2, 4), Grid(1, 2, 8)], 2)
    assert shares == (TokenShare(0, ((2, 3), (1, 1))), TokenShare(28, ((3, 1),)))


@pytest.mark.parametrize("world_size", range(1, 13))
def test_shares_cover_all_rows_once(world_size: int) -> None:
    grids = [Grid(1, 2, 2), Grid(4, 2, 6), Grid(1, 6, 4), Grid(2, 4, 4)]
    shares = split_tokens(grids, world_size)
    rows = [row for share in shares for row in range(*share.rows.indices(10**6))]
    assert rows == list(range(sum(grid.num_patches for grid in grids)))
    assert max(share.num_tokens for share in shares) == share_size(grids, world_size)
