"""The shared-memory collectives: threads as ranks over one mapping, then real ranks under torchrun beside gloo."""

import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from running import ROOT
from torch import Tensor

from tp.exchange import PIECE_BYTES, ExchangeError, ExchangeTimeoutError, SharedMemoryExchange


def on_all_ranks(world_size: int, call: Callable[[SharedMemoryExchange, int], Tensor]) -> list[Tensor]:
    memory = mmap.mmap(-1, mmap.PAGESIZE + world_size * PIECE_BYTES)
    exchanges = [
        SharedMemoryExchange(memory, rank=rank, world_size=world_size, timeout_s=60) for rank in range(world_size)
    ]
    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(call, exchanges, range(world_size)))


def parts(world_size: int, *shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(world_size)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (1024, 1024), (1100, 2100)])  # the last takes several rounds
def test_all_reduce(shape: tuple[int, int], world_size: int, dtype: torch.dtype) -> None:
    mine = parts(world_size, *shape, dtype=dtype)
    expected = sum(part.float() for part in mine).to(dtype)  # type: ignore[union-attr]
    results = on_all_ranks(world_size, lambda exchange, rank: exchange.all_reduce_(mine[rank]))
    assert all(torch.equal(result, expected) for result in results)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("rows", [1, 5, 900])
def test_reduce_scatter(rows: int, world_size: int) -> None:
    mine = parts(world_size, world_size, rows, 2000)
    expected = sum(mine)
    results = on_all_ranks(world_size, lambda exchange, rank: exchange.reduce_scatter(mine[rank]))
    assert torch.equal(torch.stack(results), expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("rows", [1, 5, 700])
def test_all_gather(rows: int, world_size: int) -> None:
    mine = parts(world_size, rows, 2000)
    results = on_all_ranks(world_size, lambda exchange, rank: exchange.all_gather(mine[rank]))
    assert all(torch.equal(result, torch.cat(mine)) for result in results)


def test_one_call_does_not_overwrite_what_a_slow_rank_still_reads() -> None:
    def many(exchange: SharedMemoryExchange, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(rank)
        for step in range(200):
            x = torch.full((50,), float(step + rank))
            if torch.rand(1, generator=generator) < 0.2:
                threading.Event().wait(0.002)
            assert torch.equal(exchange.all_reduce_(x), torch.full((50,), 3.0 * step + 3))
            gathered = exchange.all_gather(torch.full((2,), float(rank)))
            assert gathered.tolist() == [0, 0, 1, 1, 2, 2]
        return x

    on_all_ranks(3, many)


def test_a_peer_that_does_not_come_is_named() -> None:
    memory = mmap.mmap(-1, mmap.PAGESIZE + 3 * PIECE_BYTES)
    exchange = SharedMemoryExchange(memory, rank=0, world_size=3, timeout_s=0.2)
    with pytest.raises(ExchangeTimeoutError, match=r"rank 0 waited 0\.2 s for ranks \[1, 2\]"):
        exchange.all_reduce_(torch.ones(4))


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_of_torchrun_agree_with_gloo(world_size: int) -> None:
    script = Path(__file__).with_name("exchange_ranks.py")
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size), str(script)]
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, "-m", *command],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("alike") == world_size  # their lines may run into each other


def test_other_machines_do_not_keep_stores_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(ExchangeError, match="aarch64 does not keep stores in order"):
        SharedMemoryExchange.join(rank=0, world_size=2, timeout_s=1)
