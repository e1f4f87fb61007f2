"""Where a patch is: the resampled position table and the 2-D rotary angles, in the packed row order.

Shapes: an item has grid (t, h, w) and n = t h w rows in the order (token row, token column, frame, 2, 2): merged
tokens row-major, then frames, then the 2 x 2 patches of the token. D is the hidden size, d the head size.
Pure tensors. Maths: MoonViT as in Kimi K3 (learned table, `interpolate` without align_corners or antialiasing, 2-D
RoPE with theta 10000 on neighbouring channel pairs). Called by tp/model.py and tp/kernels.py.
"""

from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from tp.memory import NARROW_RUN, ROW_CHUNK
from tp.spec import ROPE_THETA, Grid
from tp.streams import to_device

Interpolation = Literal["bilinear", "bicubic"]
CUBIC_A = -0.75


def add_position_embedding_(x: Tensor, table: Tensor, grid: Grid, interpolation: Interpolation) -> None:
    """Add the position embedding of one item to its rows, in place, rounding it once to x's dtype.

    x [n, D]; table [height, width, D] in float32. Resampling is separable: R_h (table R_w^T), a run of token rows at a
    time. With t > 1 each frame also gets its time embedding; with t = 1 none is added.
    """
    height, width, _ = table.shape
    by_row = resampling_matrix(height, grid.h, interpolation, table.device)  # [h, height]
    by_column = resampling_matrix(width, grid.w, interpolation, table.device)  # [w, width]
    token_rows = max(1, ROW_CHUNK // (2 * max(grid.w, width)))
    rows_per_token_row = 2 * grid.w * grid.t
    for first in range(0, grid.h // 2, token_rows):
        weights = by_row[2 * first : 2 * (first + token_rows)]
        part = by_column @ torch.tensordot(weights, table, 1)  # [2k, w, D]
        part = part.view(-1, 2, grid.w // 2, 2, x.shape[1]).transpose(1, 2)  # [k, w/2, 2, 2, D]
        rows = x[first * rows_per_token_row : (first + token_rows) * rows_per_token_row]
        rows = rows.view(-1, grid.w // 2, grid.t, 2, 2, x.shape[1])  # [k, w/2, t, 2, 2, D]
        for frame in range(grid.t):
            rows[:, :, frame].add_(_with_time(part, frame, grid.t).to(x.dtype))


def _with_time(part: Tensor, frame: int, num_frames: int) -> Tensor:
    return part if num_frames == 1 else part + time_embedding(frame, part.shape[-1], part.device)


def time_embedding(frame: int, size: int, device: torch.device) -> Tensor:
    """[size] in float32: sin(frame * omega), then cos, with omega_j = 10000^(-j / (size / 2))."""
    omega = ROPE_THETA ** (torch.arange(size // 2, dtype=torch.float64) / (-size / 2))
    return to_device(torch.cat([torch.sin(frame * omega), torch.cos(frame * omega)]).float(), device)


@lru_cache(maxsize=256)
def resampling_matrix(size_in: int, size_out: int, interpolation: Interpolation, device: torch.device) -> Tensor:
    """[out, in] in float32: row i holds the weights of output i, whose source is (i + 0.5) * in / out - 0.5.

    Bilinear clamps the source at 0; bicubic (A = -0.75) clamps its four taps to the border. Sources and weights are
    float32, rounded where `interpolate` rounds them: scale first, then product and difference in one fused step.
    Equal sizes give the identity. Kept for the sizes met last, 128 KiB each at most for a 64-entry table.
    """
    scale = torch.tensor(size_in, dtype=torch.float32) / size_out
    source = (scale.double() * (torch.arange(size_out) + 0.5) - 0.5).float()
    if interpolation == "bilinear":
        source = source.clamp(min=0)
    floor = source.floor()
    fraction = source - floor
    weights = {0: 1 - fraction, 1: fraction} if interpolation == "bilinear" else _cubic_weights(fraction)
    matrix = torch.zeros(size_out, size_in)
    for tap, weight in weights.items():
        column = (floor.long() + tap).clamp(0, size_in - 1)
        matrix.scatter_add_(1, column[:, None], weight[:, None])
    return to_device(matrix, device)


def _cubic_weights(fraction: Tensor) -> dict[int, Tensor]:
    """Weight of each tap for a source `fraction` past tap 0 (Keys' cubic convolution)."""

    def near(x: Tensor) -> Tensor:  # |x| <= 1
        return ((CUBIC_A + 2) * x - (CUBIC_A + 3)) * x * x + 1

    def far(x: Tensor) -> Tensor:  # 1 < |x| < 2
        return ((CUBIC_A * x - 5 * CUBIC_A) * x + 8 * CUBIC_A) * x - 4 * CUBIC_A

    return {-1: far(fraction + 1), 0: near(fraction), 1: near(1 - fraction), 2: far(2 - fraction)}


def rotations(grid: Grid, head_dim: int, device: torch.device) -> Tensor:
    """[n, d / 2] unit complex64: pair 2i turns by column * f_i, pair 2i + 1 by row * f_i, f_i = 10000^(-4i / d).

    Every frame has the same. Angles are float32, as the reference's are.
    """
    by_column = _turns(grid.w, head_dim, device).view(1, grid.w // 2, 1, 1, 2, -1)
    by_row = _turns(grid.h, head_dim, device).view(grid.h // 2, 1, 1, 2, 1, -1)
    out = by_row.new_empty(grid.h // 2, grid.w // 2, grid.t, 2, 2, head_dim // 4, 2)
    out[..., 0] = by_column
    out[..., 1] = by_row
    return out.view(grid.num_patches, head_dim // 2)


@lru_cache(maxsize=256)
def _turns(size: int, head_dim: int, device: torch.device) -> Tensor:
    """[size, d / 4]. Kept for the sizes met last: each is some kilobytes, and on CUDA eight kernels to launch."""
    frequencies = 1.0 / ROPE_THETA ** (torch.arange(0, head_dim, 4, dtype=torch.float32, device=device) / head_dim)
    angles = torch.outer(torch.arange(size, dtype=torch.float32, device=device), frequencies)
    return torch.polar(torch.ones_like(angles), angles)


def rotate_(x: Tensor, rotation: Tensor, *, scale: float = 1.0) -> None:
    """Turn neighbouring channel pairs (2j, 2j + 1) of x [N, ..., d] by rotation [N, d / 2], times scale, in place.

    Products are float32 whatever x's dtype and rounded once; on a CPU a run of rows at a time, on CUDA all at once, as
    launching a kernel costs more there than its float32 copy.
    """
    middle = (1,) * (x.ndim - 2)
    run = NARROW_RUN if x.device.type == "cpu" else x.shape[0]
    for first in range(0, x.shape[0], run):
        rows = x[first : first + run]
        turned = rows.float()  # rows themselves when they are float32
        turn = scale * rotation[first : first + run]
        torch.view_as_complex(turned.view(*turned.shape[:-1], -1, 2)).mul_(turn.view(turn.shape[0], *middle, -1))
        if turned is not rows:
            rows.copy_(turned)
        del turned  # before the next run's
