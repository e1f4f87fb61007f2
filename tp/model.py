"""The MoonViT encoder with its projector, tensor parallel: packed uint8 patches in, merged tokens out.

Shapes: N packed patches, D hidden size, T merged tokens (N / 4 for images), W ranks, S = ceil(T / W) tokens of a
rank's share, and per rank H heads of size d, Q = H d, M MLP columns. Rows of an item lie in the order (token row,
token column, frame, 2, 2), so merging is a view. Families differ in values of the spec only.

Layers run over a bounded run of rows at a time and attention keeps no scores, so a forward holds few [N, ...] tensors:
tp/memory.py counts them. Knows shapes, not weights' names on disk (tp/weights.py) or sockets; tp/runner.py calls it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from tp.attention import Sequences
from tp.checkpoint import MLP_UNIT
from tp.kernels import STOCK, Gelu, Kernels
from tp.memory import NARROW_RUN, ROW_CHUNK
from tp.parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    TokenShare,
    TPGroup,
    empty_parameter,
    split_tokens,
)
from tp.positions import add_position_embedding_, rotations
from tp.spec import CHANNELS, EncoderSpec, Grid, ProcessorSpec
from tp.streams import to_device

CPU = torch.device("cpu")
TOWER_LAYER_NORM_EPS = 1e-5
RMS_NORM_EPS = 2.0**-23  # what the reference does on current torch, in every dtype


@dataclass(frozen=True, slots=True)
class Packing:
    """What the grids of a batch mean for its rows: which belong together, how they turn, which rank merges them."""

    sequences: Sequences
    rotation: Tensor  # [N, d / 2] complex64
    shares: tuple[TokenShare, ...]

    @property
    def is_of_images(self) -> bool:
        """No video chunk: one frame for each token."""
        return all(frames == 1 for share in self.shares for _, frames in share.segments)


class MoonViT(nn.Module):
    """Patch embedding, blocks, final norm, 2 x 2 merge, projector."""

    def __init__(
        self, spec: EncoderSpec, group: TPGroup, *, rms_norm_eps: float = RMS_NORM_EPS, kernels: Kernels = STOCK
    ) -> None:
        super().__init__()
        self.spec = spec
        self.group = group
        self.patch_embed = Linear(spec.patch_bytes, spec.hidden_size, bias=spec.has_bias, kernels=kernels)
        self.pos_emb = empty_parameter(spec.pos_emb_height, spec.pos_emb_width, spec.hidden_size)
        self.blocks = nn.ModuleList(Block(spec, group, rms_norm_eps, kernels) for _ in range(spec.num_layers))
        self.final_norm = _tower_norm(spec, rms_norm_eps)
        self.projector = Projector(spec, kernels)

    @torch.inference_mode()
    def forward(self, pixels: Tensor, grids: Sequence[Grid]) -> Tensor:
        """uint8 [N, 588] -> [T, text hidden], all merged tokens on every rank."""
        return self.gather(self.encode_rows(self.embed(pixels, grids), self.pack(grids)), grids)

    def pack(self, grids: Sequence[Grid]) -> Packing:
        """What these grids, in this order, mean for the rows of a batch."""
        device = self.group.device
        return Packing(
            Sequences.of([grid.num_patches for grid in grids], device),
            torch.cat([rotations(grid, self.spec.head_dim, device) for grid in grids]),
            split_tokens(grids, self.group.world_size),
        )

    @torch.inference_mode()
    def encode_rows(self, x: Tensor, packing: Packing) -> Tensor:
        """Embedded patches [N, D] -> [S, text hidden]: the tokens of this rank's share, then zeros. Overwrites x."""
        share = packing.shares[self.group.rank]
        *blocks, last = cast("list[Block]", list(self.blocks))
        for block in blocks:
            block(x, packing)
        last.add_attention_(x, packing)
        y = last.add_mlp_to_share(x, packing.shares, self.group.rank)  # [rows of the share, D]
        del x
        by_rows(self.final_norm, y, out=y)
        tokens = merge(y, share.segments)  # [tokens of the share, 4 D]
        size = max(share.num_tokens for share in packing.shares)
        out = tokens.new_zeros(size, self.spec.text_hidden_size)
        by_rows(self.projector, tokens, out=out[: share.num_tokens], rows=ROW_CHUNK // 4)
        return out

    def gather(self, share: Tensor, grids: Sequence[Grid]) -> Tensor:
        """[S, text hidden] of every rank -> [T, text hidden] on every rank."""
        return self.group.all_gather(share)[: sum(grid.num_tokens for grid in grids)]

    def embed(self, pixels: Tensor, grids: Sequence[Grid]) -> Tensor:
        """uint8 [N, 588] -> [N, D]: normalised pixels through the patch embedding, plus position embeddings."""
        values = pixel_table(self.spec.processor, self.pos_emb.dtype, pixels.device)
        x = values.new_empty(pixels.shape[0], self.spec.hidden_size)
        by_rows(lambda rows: self.patch_embed(normalise(rows, values)), pixels, out=x)
        table = self.pos_emb.float()
        first = 0
        for grid in grids:
            rows = x[first : first + grid.num_patches]
            add_position_embedding_(rows, table, grid, self.spec.pos_emb_interpolation)
            first += grid.num_patches
        return x


class Block(nn.Module):
    """x += wo(attention(norm0(x))); x += fc1(gelu(fc0(norm1(x)))), heads and MLP columns split over ranks."""

    def __init__(self, spec: EncoderSpec, group: TPGroup, rms_norm_eps: float, kernels: Kernels) -> None:
        super().__init__()
        hidden, width, mlp, bias = spec.hidden_size, spec.qkv_size, spec.mlp_size, spec.has_bias
        self.head_dim = spec.head_dim
        self._kernels = kernels
        self.norm0 = _tower_norm(spec, rms_norm_eps)
        self.qkv = ColumnParallelLinear(
            hidden, 3 * width, parts=3, unit=spec.head_dim, group=group, kernels=kernels, bias=bias
        )
        self.wo = RowParallelLinear(width, hidden, unit=spec.head_dim, group=group, kernels=kernels, bias=bias)
        self.norm1 = _tower_norm(spec, rms_norm_eps)
        self.fc0 = ColumnParallelLinear(hidden, mlp, unit=MLP_UNIT, group=group, kernels=kernels, bias=bias)
        self.fc1 = RowParallelLinear(mlp, hidden, unit=MLP_UNIT, group=group, kernels=kernels, bias=bias)

    def forward(self, x: Tensor, packing: Packing) -> None:
        """Run the block on x [N, D], in place."""
        self.add_attention_(x, packing)
        self.add_mlp_(x)

    def add_attention_(self, x: Tensor, packing: Packing) -> None:
        """x += wo(attention(norm0(x))), in place on x [N, D]."""
        self.wo.add_to_(x, self._attention(x, packing))

    def add_mlp_(self, x: Tensor) -> None:
        """x += mlp(x), in place on x [N, D]."""
        if self.fc1.is_whole:
            for rows in torch.split(x, ROW_CHUNK):
                self.fc1.add_to_(rows, self._expanded(rows))
        else:  # one sum over ranks for all rows
            x += self.fc1.reduce_(by_rows(self._mlp, x))

    def add_mlp_to_share(self, x: Tensor, shares: Sequence[TokenShare], rank: int) -> Tensor:
        """x + mlp(x) for the rows of this rank's share only: [N, D] -> [rows of the share, D]. May overwrite x.

        The sum over ranks is scattered by share instead of given to all; shares are padded to the longest with zeros.
        """
        if self.fc1.is_whole:
            self.add_mlp_(x)
            return x
        partials = x.new_zeros(len(shares), max(share.num_rows for share in shares), x.shape[1])  # [W, R, D]
        for share, out in zip(shares, partials, strict=True):
            by_rows(self._mlp, x[share.rows], out=out[: share.num_rows])
        y = self.fc1.reduce_scatter(partials)[: shares[rank].num_rows]
        y += x[shares[rank].rows]
        return y

    def _attention(self, x: Tensor, packing: Packing) -> Tensor:
        qkv = self.qkv(self.norm0(x)).view(x.shape[0], 3, -1, self.head_dim)  # [N, 3 Q] -> [N, 3, H, d]
        q, k = self._kernels.rotate(qkv[:, :2], packing.rotation, scale=self.head_dim**-0.5)
        return self._kernels.attend(q, k, qkv[:, 2], packing.sequences).flatten(1)  # [N, H, d] -> [N, Q]

    def _mlp(self, rows: Tensor) -> Tensor:
        return self.fc1.partial(self._expanded(rows))

    def _expanded(self, rows: Tensor) -> Tensor:
        expanded: Tensor = self.fc0(self.norm1(rows), gelu="tanh")
        return expanded


class Projector(nn.Module):
    """The 4 patches of a merged token, side by side, through two linears with an exact GELU between them."""

    def __init__(self, spec: EncoderSpec, kernels: Kernels) -> None:
        super().__init__()
        hidden, merged = spec.hidden_size, 4 * spec.hidden_size
        self.is_pre_norm = spec.projector == "pre_norm"
        self.norm = Norm(spec, hidden if self.is_pre_norm else spec.text_hidden_size, spec.projector_norm_eps)
        self.fc0 = Linear(merged, merged, bias=spec.has_bias, kernels=kernels)
        self.fc1 = Linear(merged, spec.text_hidden_size, bias=spec.has_bias, kernels=kernels)

    def forward(self, tokens: Tensor) -> Tensor:
        """[S, 4 D] -> [S, text hidden]; the norm is over each patch before, or over the token after."""
        if self.is_pre_norm:
            patches: Tensor = self.norm(tokens.view(tokens.shape[0], 4, -1))
            tokens = patches.flatten(1)
        tokens = self.fc1(self.fc0(tokens, gelu="none"))
        return tokens if self.is_pre_norm else self.norm(tokens)


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last dimension: float32 inside, rounded once."""

    def __init__(self, spec: EncoderSpec, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = empty_parameter(width)
        self.bias = empty_parameter(width) if spec.norm == "layernorm" else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> the same."""
        shape = self.weight.shape
        if self.bias is not None:
            return F.layer_norm(x, shape, self.weight, self.bias, self.eps)
        if x.is_cuda:  # one fused kernel
            return F.rms_norm(x, shape, self.weight, self.eps)
        weight = self.weight.float()
        return by_rows(lambda rows: F.rms_norm(rows.float(), shape, weight, self.eps), x, rows=NARROW_RUN)


class Linear(nn.Module):
    """y = x W^T + b, whole on every rank."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, kernels: Kernels) -> None:
        super().__init__()
        self._kernels = kernels
        self.weight = empty_parameter(out_features, in_features)
        self.bias = empty_parameter(out_features) if bias else None

    def forward(self, x: Tensor, gelu: Gelu | None = None) -> Tensor:
        """[..., in] -> [..., out], with a GELU after it where one is named."""
        return self._kernels.linear(x, self.weight, self.bias, gelu=gelu)


def _tower_norm(spec: EncoderSpec, rms_norm_eps: float) -> Norm:
    return Norm(spec, spec.hidden_size, rms_norm_eps if spec.norm == "rmsnorm" else TOWER_LAYER_NORM_EPS)


def by_rows(
    function: Callable[[Tensor], Tensor], x: Tensor, *, out: Tensor | None = None, rows: int = ROW_CHUNK
) -> Tensor:
    """out[i] = function(x)[i] for a function that treats rows alike, at most `rows` of them at a time; returns out.

    Without `out`, the result is like x.
    """
    if out is None:
        if x.shape[0] <= rows:
            return function(x).to(x.dtype)
        out = torch.empty_like(x)
    for first in range(0, x.shape[0], rows):
        out[first : first + rows] = function(x[first : first + rows])
    return out


def merge(x: Tensor, segments: Sequence[tuple[int, int]]) -> Tensor:
    """[rows, D] -> [tokens, 4 D]: the 2 x 2 patches of each token side by side, meaned over frames.

    `segments` gives (tokens, frames) of each item, in order. For images this is a view.
    """
    merged = x.view(-1, 4 * x.shape[1])  # [frames of tokens, 4 D]
    if all(frames == 1 for _, frames in segments):
        return merged
    parts = torch.split(merged, [tokens * frames for tokens, frames in segments])
    return torch.cat([part.view(*segment, -1).mean(1) for part, segment in zip(parts, segments, strict=True)])


@cache
def pixel_table(processor: ProcessorSpec, dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
    """[3 * 256]: what each pixel value of each channel becomes, with the reference's rounding at each step.

    One for all who ask for the same, so not to be written to.
    K3, K2.5: v / 255 in float64 to float32; less the mean in float64 to float32; times 1 / std in float64 to float32.
    Kimi-VL: v / 255, less the mean, divided by std, all in float32.
    """
    if processor.rule == "kimi_vl":
        values = torch.arange(256, dtype=torch.float32) / 255
        means, stds = torch.tensor([processor.mean, processor.std], dtype=torch.float32)[..., None]  # [3, 1] each
        table: Tensor = (values - means) / stds
        return to_device(table.flatten().to(dtype), device)
    scaled = (torch.arange(256, dtype=torch.float64) / 255).float()
    channels = [
        ((scaled.double() - mean).float().double() * (1 / std)).float()
        for mean, std in zip(processor.mean, processor.std, strict=True)
    ]
    return to_device(torch.cat(channels).to(dtype), device)


def normalise(pixels: Tensor, table: Tensor) -> Tensor:
    """uint8 [n, 588] in the order (channel, row, column) -> [n, 588] of the table's dtype."""
    offsets = torch.arange(0, 256 * CHANNELS, 256, dtype=torch.int32, device=pixels.device)
    index = pixels.view(pixels.shape[0], CHANNELS, -1) + offsets[:, None]  # [n, 3, 196] int32
    return table.index_select(0, index.flatten()).view(pixels.shape)
