"""The three collectives among ranks of one host through shared memory, in place of gloo.

Shapes: W ranks; x [...] of any shape, alike on every rank. Each rank owns one piece of a memfd that all of them map:

    copy in my part -> all have -> sum my slice of it over all ranks -> all have -> copy out all slices

A part larger than a piece goes in several rounds, so memory is W pieces whatever the batch. A rank announces each step
by counting up a word of its own that only it writes; the others poll these words: a spin at first, then short sleeps,
so that ranks may outnumber cores, and a deadline. That stores become visible in order is a promise of x86 (TSO), so the
exchange is offered there only. Sums are float32 in rank order: every rank gets the same bits. Called by tp/parallel.py.
"""

import itertools
import mmap
import os
import platform
import time
from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

PIECE_BYTES = 4 << 20  # of each rank; twice that adds nothing measurable

_WORD_BYTES = 64  # one cache line for each rank's counter
_SPIN_S = 200e-6  # of polling before the first sleep
_SLEEP_S = 50e-6


class ExchangeError(RuntimeError):
    """The ranks of a group cannot share memory."""


class ExchangeTimeoutError(RuntimeError):
    """A peer did not come to a collective within the deadline."""


class SharedMemoryExchange:
    """One rank's view of the shared pieces. Every rank must make the same calls in the same order."""

    def __init__(self, memory: mmap.mmap, *, rank: int, world_size: int, timeout_s: float) -> None:
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._memory = memory
        self._counters = np.frombuffer(memory, np.uint64, count=_WORD_BYTES // 8 * world_size)[:: _WORD_BYTES // 8]
        pieces = torch.frombuffer(memory, dtype=torch.uint8, offset=_header_bytes(world_size))
        self._pieces = pieces.view(world_size, PIECE_BYTES)
        self._step = 0

    @classmethod
    def join(cls, *, rank: int, world_size: int, timeout_s: float) -> "SharedMemoryExchange":
        """Made by rank 0 and opened by the others through its file descriptor; needs the default process group.

        Raises ExchangeError, on every rank, where they do not share a host or may not open each other's descriptors.
        """
        size = _header_bytes(world_size) + world_size * PIECE_BYTES
        if platform.machine() != "x86_64":
            raise ExchangeError(f"{platform.machine()} does not keep stores in order")
        own = _make(size) if rank == 0 else -1
        where = torch.tensor([os.getpid(), own])
        dist.broadcast(where, 0)
        error, memory = None, None
        try:
            memory = _map(f"/proc/{where[0]}/fd/{where[1]}", size)
        except OSError as problem:
            error = problem
        failed = torch.tensor([int(error is not None)])
        dist.all_reduce(failed)  # all have tried
        if own >= 0:
            os.close(own)
        if memory is None or failed:
            raise ExchangeError(
                f"{int(failed)} of {world_size} ranks cannot open rank 0's memory: {error or 'here it can'}"
            )
        return cls(memory, rank=rank, world_size=world_size, timeout_s=timeout_s)

    def all_reduce_(self, x: Tensor) -> Tensor:
        """Sum over ranks, in place; returns x."""
        for part in _parts(x.view(-1), PIECE_BYTES):
            bounds = self._slices(len(part))
            self._copy_in(part)
            mine = slice(*bounds[self._rank])
            self._piece(self._rank, part)[mine] = self._sum(part, mine)
            self._meet()
            for rank, (start, stop) in enumerate(bounds):
                part[start:stop] = self._piece(rank, part)[start:stop]
            self._arrive()
        return x

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """[W, R, ...] -> [R, ...]: the sum over ranks of this rank's piece."""
        out = torch.empty_like(x[0])
        rows = x.flatten(1)  # [W, elements]
        flat = out.view(-1)
        for first, last in _ranges(rows.shape[1], PIECE_BYTES // self._world_size // x.itemsize):
            part = rows[:, first:last]
            self._copy_in(part.reshape(-1))
            width = last - first
            flat[first:last] = self._sum(part, slice(self._rank * width, (self._rank + 1) * width))
            self._arrive()
        return out

    def all_gather(self, x: Tensor) -> Tensor:
        """[S, ...] -> [W * S, ...]: every rank's piece, in rank order."""
        out = x.new_empty(self._world_size, *x.shape)
        rows = out.view(self._world_size, -1)
        for first, last in _ranges(x.numel(), PIECE_BYTES // x.itemsize):
            part = x.view(-1)[first:last]
            self._copy_in(part)
            for rank in range(self._world_size):
                rows[rank, first:last] = self._piece(rank, part)
            self._arrive()
        return out.flatten(0, 1)

    def _piece(self, rank: int, like: Tensor) -> Tensor:
        """The first elements of a rank's piece, as many as `like` has and of its dtype."""
        return self._pieces[rank, : like.numel() * like.itemsize].view(like.dtype)

    def _sum(self, part: Tensor, where: slice) -> Tensor:
        total = self._piece(0, part)[where].float()
        for rank in range(1, self._world_size):
            total += self._piece(rank, part)[where]
        return total.to(part.dtype)

    def _slices(self, length: int) -> list[tuple[int, int]]:
        cuts = [length * rank // self._world_size for rank in range(self._world_size + 1)]
        return list(itertools.pairwise(cuts))

    def _copy_in(self, part: Tensor) -> None:
        self._wait()  # until all have read what was there
        self._piece(self._rank, part).copy_(part)
        self._meet()

    def _meet(self) -> None:
        self._arrive()
        self._wait()

    def _arrive(self) -> None:
        self._step += 1
        self._counters[self._rank] = self._step

    def _wait(self) -> None:
        """Until every rank has arrived where this one has. Raises ExchangeTimeoutError."""
        started = time.monotonic()
        while self._counters.min() < self._step:
            waited = time.monotonic() - started
            if waited > self._timeout_s:
                late = [rank for rank, step in enumerate(self._counters.tolist()) if step < self._step]
                raise ExchangeTimeoutError(f"rank {self._rank} waited {self._timeout_s:g} s for ranks {late}")
            if waited > _SPIN_S:
                time.sleep(_SLEEP_S)


def _make(size: int) -> int:
    descriptor = os.memfd_create("tpvision-exchange")
    os.ftruncate(descriptor, size)
    return descriptor


def _map(path: str, size: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)


def _header_bytes(world_size: int) -> int:
    return -(-_WORD_BYTES * world_size // mmap.PAGESIZE) * mmap.PAGESIZE


def _ranges(length: int, step: int) -> Iterator[tuple[int, int]]:
    for first in range(0, length, step):
        yield first, min(first + step, length)


def _parts(x: Tensor, num_bytes: int) -> Iterator[Tensor]:
    for first, last in _ranges(len(x), num_bytes // x.itemsize):
        yield x[first:last]
