"""Tensor parallelism: the group of ranks, the linears that are split over it, and the split of tokens over it.

Shapes: W ranks, N packed patches, R rows of a rank's share of tokens, S merged tokens of a share.
Column-parallel layers own rows of the weight (columns of its product), row-parallel layers own columns of it and sum
over ranks (Megatron-LM's scheme, https://arxiv.org/abs/1909.08053). Called by tp/model.py; started by tp/worker.py.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tp.checkpoint import shard_range
from tp.exchange import ExchangeError, SharedMemoryExchange
from tp.kernels import STOCK, Gelu, Kernels
from tp.spec import Grid

log = logging.getLogger("tpvision.parallel")

Exchange = Literal["auto", "gloo", "shared_memory"]


class Collectives(Protocol):
    """What tensor parallelism asks of a group of more than one rank."""

    def all_reduce_(self, x: Tensor) -> Tensor:
        """Sum over ranks, in place; returns x."""
        ...

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """[W, R, ...] -> [R, ...]: the sum over ranks of this rank's piece."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """[S, ...] -> [W * S, ...]: every rank's piece, in rank order."""
        ...


class ProcessGroupCollectives:
    """Through torch.distributed's default group: gloo or NCCL."""

    def all_reduce_(self, x: Tensor) -> Tensor:
        """Sum over ranks, in place; returns x."""
        dist.all_reduce(x)
        return x

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """[W, R, ...] -> [R, ...]: the sum over ranks of this rank's piece."""
        out = torch.empty_like(x[0])
        dist.reduce_scatter_single(out, x.flatten(0, 1))
        return out

    def all_gather(self, x: Tensor) -> Tensor:
        """[S, ...] -> [W * S, ...]: every rank's piece, in rank order."""
        out = x.new_empty(dist.get_world_size() * x.shape[0], *x.shape[1:])
        dist.all_gather_single(out, x)
        return out


class TPGroup:
    """The ranks that share one encoder, and their three collectives. World size 1 needs no process group."""

    def __init__(
        self, *, rank: int, world_size: int, device: torch.device, collectives: Collectives | None = None
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self._collectives = collectives or ProcessGroupCollectives()

    @classmethod
    def single(cls, device: torch.device | str = "cpu") -> Self:
        """A group of one rank."""
        return cls(rank=0, world_size=1, device=torch.device(device))

    @classmethod
    def from_environment(cls, device: torch.device, *, timeout_s: float, exchange: Exchange = "auto") -> Self:
        """Join the group that torchrun's environment describes: NCCL on CUDA; gloo or shared memory on CPU.

        `timeout_s` bounds the rendezvous and every collective; a peer that hangs is noticed after it. Raises
        ExchangeError where shared memory is asked for and cannot be had.
        """
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if world_size == 1:
            return cls(rank=rank, world_size=world_size, device=device)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            timeout=timedelta(seconds=timeout_s),
            device_id=device if device.type == "cuda" else None,
        )
        collectives = None
        if device.type == "cpu" and exchange != "gloo":
            collectives = _share_memory(rank, world_size, timeout_s, is_needed=exchange == "shared_memory")
        return cls(rank=rank, world_size=world_size, device=device, collectives=collectives)

    def close(self) -> None:
        """Leave the group; a second call does nothing."""
        if self.world_size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def describe_collectives(self) -> str:
        """What carries the collectives, in words for a person."""
        if self.world_size == 1:
            return "none"
        if isinstance(self._collectives, SharedMemoryExchange):
            return "shared memory"
        return str(dist.get_backend())

    def all_reduce_(self, x: Tensor) -> Tensor:
        """Sum over ranks, in place; returns x."""
        return x if self.world_size == 1 else self._collectives.all_reduce_(x)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """[W, R, ...] -> [R, ...]: the sum over ranks of this rank's piece."""
        return x[0] if self.world_size == 1 else self._collectives.reduce_scatter(x)

    def all_gather(self, x: Tensor) -> Tensor:
        """[S, ...] -> [W * S, ...]: every rank's piece, in rank order."""
        return x if self.world_size == 1 else self._collectives.all_gather(x)


def _share_memory(rank: int, world_size: int, timeout_s: float, *, is_needed: bool) -> Collectives | None:
    try:
        return SharedMemoryExchange.join(rank=rank, world_size=world_size, timeout_s=timeout_s)
    except ExchangeError as error:
        if is_needed:
            raise
        log.info("ranks cannot share memory, gloo carries the collectives: %s", error)
        return None


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's part of a full parameter: these half-open ranges of dimension `dim`, one after the other."""

    dim: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        """Length of the part along `dim`."""
        return sum(stop - start for start, stop in self.ranges)


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b with the rows of W (and b) split over ranks: each rank computes its own output columns.

    W may stack `parts` matrices of equal height (q, k, v): each is split separately, in whole runs of `unit` rows.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: TPGroup,
        kernels: Kernels = STOCK,
        unit: int,
        bias: bool,
        parts: int = 1,
    ) -> None:
        super().__init__()
        self._kernels = kernels
        height = out_features // parts
        start, stop = shard_range(height, unit=unit, rank=group.rank, world_size=group.world_size)
        self._shard = Shard(0, tuple((part * height + start, part * height + stop) for part in range(parts)))
        self.weight = empty_parameter(self._shard.size, in_features)
        self.bias = empty_parameter(self._shard.size) if bias else None

    def shard(self, parameter: str) -> Shard | None:
        """What this rank holds of the full `weight` or `bias`."""
        del parameter  # both are split alike
        return self._shard

    def forward(self, x: Tensor, gelu: Gelu | None = None) -> Tensor:
        """[N, in] -> [N, out of this rank], with a GELU after it where one is named."""
        return self._kernels.linear(x, self.weight, self.bias, gelu=gelu)


class RowParallelLinear(nn.Module):
    """y = x W^T + b with the columns of W split over ranks: partial products are summed, the bias is added once."""

    def __init__(
        self, in_features: int, out_features: int, *, group: TPGroup, kernels: Kernels = STOCK, unit: int, bias: bool
    ) -> None:
        super().__init__()
        self._group = group
        self._kernels = kernels
        self._shard = Shard(1, (shard_range(in_features, unit=unit, rank=group.rank, world_size=group.world_size),))
        self.weight = empty_parameter(out_features, self._shard.size)
        self.bias = empty_parameter(out_features) if bias else None

    def shard(self, parameter: str) -> Shard | None:
        """What this rank holds of the full `weight` or `bias`; None is all of it."""
        return self._shard if parameter == "weight" else None

    @property
    def is_whole(self) -> bool:
        """Whether this rank holds all of the weight, so that there is nothing to sum."""
        return self._group.world_size == 1

    def add_to_(self, x: Tensor, y: Tensor) -> None:
        """x += the sum over ranks of y W^T, plus the bias, in place: x [N, out], y [N, in of this rank]."""
        if self.is_whole:
            self._kernels.add_linear_(x, y, self.weight, self.bias)
        else:
            x += self.reduce_(self.partial(y))

    def partial(self, x: Tensor) -> Tensor:
        """[N, in of this rank] -> [N, out], to be summed over ranks by one of the two below."""
        return self._kernels.linear(x, self.weight)

    def reduce_(self, partial: Tensor) -> Tensor:
        """The sum over ranks plus the bias, in place: [N, out] on every rank."""
        return self._add_bias_(self._group.all_reduce_(partial))

    def reduce_scatter(self, partials: Tensor) -> Tensor:
        """[W, R, out] -> [R, out]: this rank's rows of the sum, plus the bias."""
        return self._add_bias_(self._group.reduce_scatter(partials))

    def _add_bias_(self, x: Tensor) -> Tensor:
        return x if self.bias is None else x.add_(self.bias)


def empty_parameter(*shape: int) -> nn.Parameter:
    """A parameter without storage, until tp/weights.py gives it some."""
    return nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)


@dataclass(frozen=True, slots=True)
class TokenShare:
    """The merged tokens that one rank norms, merges and projects: a run of rows, (tokens, frames) per item in it."""

    first_row: int
    segments: tuple[tuple[int, int], ...]

    @property
    def num_tokens(self) -> int:
        """Merged tokens of the share; 0 for a rank that holds padding only."""
        return sum(tokens for tokens, _ in self.segments)

    @property
    def num_rows(self) -> int:
        """Patches that these tokens are merged from."""
        return sum(4 * frames * tokens for tokens, frames in self.segments)

    @property
    def rows(self) -> slice:
        """Where they lie among the packed patches."""
        return slice(self.first_row, self.first_row + self.num_rows)


def share_size(grids: Sequence[Grid], world_size: int) -> int:
    """S, the tokens that every rank's share is padded to: ceil(all tokens / W)."""
    return -(-sum(grid.num_tokens for grid in grids) // world_size)


def split_tokens(grids: Sequence[Grid], world_size: int) -> tuple[TokenShare, ...]:
    """Cut all items' tokens, in order, into W runs of S tokens; the last runs may be short or empty."""
    size = share_size(grids, world_size)
    shares = []
    for rank in range(world_size):
        first, stop = rank * size, (rank + 1) * size
        first_row = token = 0
        segments = []
        for grid in grids:
            before = min(max(first - token, 0), grid.num_tokens)
            inside = min(max(stop - token, 0), grid.num_tokens) - before
            first_row += 4 * grid.t * before
            if inside:
                segments.append((inside, grid.t))
            token += grid.num_tokens
        shares.append(TokenShare(first_row, tuple(segments)))
    return tuple(shares)
