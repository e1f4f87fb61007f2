"""Faults for worker ranks, from outside: put this folder on PYTHONPATH and name a fault file in TP_FAULT (JSON).

`what` happens on `rank`, `where` in a batch that holds an image of `tokens` merged tokens (0: any batch, the warm-up
too), as long as `times` is above 0; each fault counts it down. It waits for the file `gate` where one is named. With
TP_IN_FLIGHT set, so many batches are in flight to a group on CPU too. With TP_POISON set, the front-end fills the slab,
and rows that are given back, with NaN; with TP_HANG_DECODERS, decode processes hang before their first line. The
product knows nothing of this.
"""

import fcntl
import importlib.machinery
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

FILE = os.environ.get("TP_FAULT")


def due_fault(rank: int, grids: Any) -> dict[str, Any] | None:
    """The fault, if this rank is to suffer it now; counted down."""
    assert FILE is not None
    with Path(FILE).open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        fault: dict[str, Any] = json.load(file)
        concerned = fault["tokens"] == 0 or any(grid.num_tokens == fault["tokens"] for grid in grids)
        if fault["times"] <= 0 or fault["rank"] != rank or not concerned:
            return None
        while "gate" in fault and not Path(fault["gate"]).exists():
            time.sleep(0.01)
        fault["times"] -= 1
        file.seek(0)
        file.truncate()
        json.dump(fault, file)
        return fault


def strike(fault: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    match fault["what"]:
        case "raise":
            raise RuntimeError("injected")
        case "exit 0":
            os._exit(0)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "memory":
            resource.setrlimit(resource.RLIMIT_AS, (1 << 20, resource.RLIM_INFINITY))
            torch.empty(1 << 30).fill_(1)
        case "sleep":
            time.sleep(3600)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "mismatch":
            dist.all_reduce(torch.zeros(3))
        case "slow":
            time.sleep(fault["seconds"])
        case other:
            raise AssertionError(other)


def spoil_runner(module: Any) -> None:
    original = module.Runner.start

    def start(self: Any, grids: Any, pixels: Any, outputs: Any = None) -> Any:
        fault = due_fault(self._group.rank, grids)
        where = fault["where"] if fault else "nowhere"
        if fault and where == "before":
            strike(fault)
        if fault and where == "during":
            spoil_block(self._model.blocks[2], fault)
        if fault and fault["what"] == "nan":
            spoil_tokens(self, grids, fault["tokens"])
        pending = original(self, grids, pixels, outputs)
        if fault and where == "after":
            strike(fault)
        return pending

    module.Runner.start = start


def spoil_block(block: Any, fault: dict[str, Any]) -> None:
    def struck(*args: Any) -> None:
        del block.add_attention_
        strike(fault)
        block.add_attention_(*args)

    block.add_attention_ = struck


def spoil_tokens(runner: Any, grids: Any, num_tokens: int) -> None:
    gather = type(runner._model).gather

    def spoilt(share: Any, all_grids: Any) -> Any:
        del runner._model.gather
        tokens = gather(runner._model, share, all_grids)
        first = 0
        for grid in grids:
            if grid.num_tokens == num_tokens:
                tokens[first, 0] = float("nan")
            first += grid.num_tokens
        return tokens

    runner._model.gather = spoilt


def poison_slab(module: Any) -> None:
    create = module.Slab.create.__func__

    def create_poisoned(cls: Any, layout: Any) -> Any:
        slab = create(cls, layout)
        poison_rows(slab, module.Run(0, layout.num_patches))
        SLABS.append(slab)
        return slab

    module.Slab.create = classmethod(create_poisoned)


def poison_allocator(module: Any) -> None:
    free = module.RowAllocator.free

    def free_poisoned(self: Any, run: Any) -> None:
        poison_rows(SLABS[-1], run)
        free(self, run)

    module.RowAllocator.free = free_poisoned


def poison_rows(slab: Any, run: Any) -> None:
    slab.pixels(run)[:] = 0xFF
    slab.tokens(run, run.num_patches // 4)[:] = 0xFF  # NaN in every dtype


SLABS: list[Any] = []
PATCHES: dict[str, Any] = {}
if FILE is not None:
    PATCHES["tp.runner"] = spoil_runner
if "TP_IN_FLIGHT" in os.environ:
    PATCHES["service.dispatch"] = lambda module: module._BATCHES_IN_FLIGHT.update(cpu=int(os.environ["TP_IN_FLIGHT"]))
if "TP_POISON" in os.environ:
    PATCHES |= {"tp.slab": poison_slab, "service.admission": poison_allocator}


class PatchingFinder(importlib.machinery.PathFinder):
    """Finds modules as usual, and changes some of them once they are loaded."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in PATCHES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec is not None and spec.loader is not None
        load = spec.loader.exec_module

        def load_and_change(module: Any) -> None:
            load(module)
            PATCHES[name](module)

        spec.loader.exec_module = load_and_change  # type: ignore[method-assign]
        return spec


if "TP_HANG_DECODERS" in os.environ and "service.decode_process" in sys.orig_argv:
    time.sleep(3600)
if PATCHES:
    sys.meta_path.insert(0, PatchingFinder)  # type: ignore[arg-type]
