import pytest
import torch
from goldens import row_order
from torch.nn import functional as F  # noqa: N812

from tp.positions import add_position_embedding_, resampling_matrix, rotate_, rotations, time_embedding
from tp.spec import Grid

CPU = torch.device("cpu")
SIZES = [(16, 4), (16, 6), (16, 18), (16, 512), (64, 2), (64, 50), (64, 132)]


def test_bilinear_weights_by_hand() -> None:
    # sources -0.25 (clamped to 0), 0.25, 0.75, 1.25 (its right neighbour clamped to 1)
    expected = torch.tensor([[1, 0], [0.75, 0.25], [0.25, 0.75], [0, 1]])
    assert torch.equal(resampling_matrix(2, 4, "bilinear", CPU), expected)


def test_bilinear_downsampling_takes_two_taps_only() -> None:
    # source 1.5 of four entries: a mean over all four would be antialiasing
    assert resampling_matrix(4, 1, "bilinear", CPU).tolist() == [[0, 0.5, 0.5, 0]]


def test_bicubic_weights_by_hand() -> None:
    # source 1.5: Keys' weights at distances 1.5, 0.5, 0.5, 1.5 with A = -0.75
    assert resampling_matrix(4, 1, "bicubic", CPU).tolist() == [[-0.09375, 0.59375, 0.59375, -0.09375]]


def test_bicubic_taps_are_clamped_to_the_border() -> None:
    # source 0.5 of two entries: taps -1 and 0 fall on entry 0, taps 1 and 2 on entry 1
    assert resampling_matrix(2, 1, "bicubic", CPU).tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_equal_sizes_give_the_identity(mode: str) -> None:
    assert torch.equal(resampling_matrix(16, 16, mode, CPU), torch.eye(16))


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize(("size_in", "size_out"), SIZES)
def test_resampling_is_what_interpolate_does(mode: str, size_in: int, size_out: int) -> None:
    table = torch.randn(size_in, size_in, 32, generator=torch.Generator().manual_seed(1))
    channels_first = table.permute(2, 0, 1)[None]
    expected = F.interpolate(channels_first, (size_out, 6), mode=mode, align_corners=False)[0].permute(1, 2, 0)
    grid = Grid(1, size_out, 6)
    x = torch.zeros(grid.num_patches, 32)
    add_position_embedding_(x, table, grid, mode)
    # torch's own kernels for it differ by this much, in the rounding of the source coordinate
    torch.testing.assert_close(x, expected.flatten(0, 1)[row_order(grid)], rtol=0, atol=1e-5)


def test_rows_are_in_token_order() -> None:
    table = torch.arange(8.0).view(2, 4, 1)  # a 2 x 4 grid: the table itself
    x = torch.zeros(8, 1)
    add_position_embedding_(x, table, Grid(1, 2, 4), "bilinear")
    assert x.flatten().tolist() == [0, 1, 4, 5, 2, 3, 6, 7]


def test_it_adds_and_rounds_once() -> None:
    table = torch.full((2, 2, 1), 0.33333334)
    x = torch.ones(4, 1, dtype=torch.bfloat16)
    add_position_embedding_(x, table, Grid(1, 2, 2), "bilinear")
    assert torch.equal(x, torch.ones(4, 1, dtype=torch.bfloat16) + table.view(4, 1).bfloat16())


def test_frames_share_the_table_and_differ_by_time() -> None:
    table = torch.randn(2, 2, 4, generator=torch.Generator().manual_seed(1))
    x = torch.zeros(8, 4)
    add_position_embedding_(x, table, Grid(2, 2, 2), "bicubic")
    torch.testing.assert_close(x[:4], table.view(4, 4) + torch.tensor([0.0, 0, 1, 1]))
    torch.testing.assert_close(x[4:], table.view(4, 4) + time_embedding(1, 4, CPU))


def test_time_embedding_by_hand() -> None:
    # omega is 1 and 10000^(-1/2) = 0.01
    expected = torch.tensor([3.0, 0.03]).double()
    found = time_embedding(3, 4, CPU)
    torch.testing.assert_close(found, torch.cat([expected.sin(), expected.cos()]).float())
    assert time_embedding(0, 4, CPU).tolist() == [0, 0, 1, 1]


def test_rotation_angles_by_hand() -> None:
    # head size 8: frequencies 1 and 10000^(-1/2) = 0.01; rows (0,0) (0,1) (1,0) (1,1) as (row, column)
    angles = rotations(Grid(1, 2, 2), 8, CPU).angle()
    expected = [[0, 0, 0, 0], [1, 0, 0.01, 0], [0, 1, 0, 0.01], [1, 1, 0.01, 0.01]]
    torch.testing.assert_close(angles, torch.tensor(expected))


def test_rotation_follows_rows_columns_and_frames() -> None:
    angles = rotations(Grid(2, 2, 4), 4, CPU).angle()  # pairs: column, row
    columns = [0, 1, 0, 1] * 2 + [2, 3, 2, 3] * 2
    torch.testing.assert_close(angles[:, 0], torch.tensor(columns, dtype=torch.float32))
    assert angles[:, 1].tolist() == [0, 0, 1, 1] * 4


def test_rotate_turns_neighbouring_channels() -> None:
    x = torch.tensor([[[1.0, 0.0, 0.0, 2.0]]])  # one row, one head: pairs (1, 0) and (0, 2)
    rotate_(x, torch.tensor([[1j, -1.0]]))
    assert x.flatten().tolist() == [0, 1, 0, -2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotate_takes_a_strided_view_longer_than_a_run(dtype: torch.dtype) -> None:
    qkv = torch.randn(5000, 3, 2, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    rotation = torch.polar(torch.ones(5000, 4), torch.randn(5000, 4, generator=torch.Generator().manual_seed(2)))
    turned = torch.view_as_complex(qkv[:, :2].float().unflatten(-1, (4, 2))) * rotation[:, None, None]
    expected = torch.view_as_real(turned).flatten(-2).to(dtype)
    v = qkv[:, 2].clone()
    rotate_(qkv[:, :2], rotation)
    torch.testing.assert_close(qkv[:, :2], expected)
    assert torch.equal(qkv[:, 2], v)
