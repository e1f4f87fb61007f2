"""Batches in flight together: the same bits as one at a time; on a GPU copies run beside the computation."""

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from goldens import GOLDEN, spec_of
from torch.profiler import ProfilerActivity, profile

from tp.parallel import TPGroup
from tp.runner import Bytes, Runner
from tp.spec import Grid
from tp.streams import streams_of, to_device

TOKEN_BYTES = spec_of("tiny-k3").text_hidden_size * 2
TIERS = (256, 1024, 4096)
DEVICES = [
    pytest.param("cpu", False, id="cpu"),
    pytest.param("cuda", False, id="cuda", marks=pytest.mark.gpu),
    pytest.param("cuda", True, id="cuda with graphs", marks=pytest.mark.gpu),
]


@dataclass(frozen=True)
class Batch:
    grids: list[Grid]
    pixels: list[Bytes]
    outputs: list[Bytes]

    @property
    def parts(self) -> tuple[list[Grid], list[Bytes], list[Bytes]]:
        return self.grids, self.pixels, self.outputs


def room(device: str, *shape: int) -> Bytes:
    """Like the slab's: pinned for a GPU, as nothing else is copied beside a computation."""
    return torch.zeros(shape, dtype=torch.uint8, pin_memory=device == "cuda").numpy()


def batch_of(grids: Sequence[Grid], device: str, seed: int) -> Batch:
    generator = np.random.default_rng(seed)
    pixels = [room(device, grid.num_patches, 588) for grid in grids]
    for each in pixels:
        each[:] = generator.integers(0, 256, each.shape, np.uint8)
    return Batch(list(grids), pixels, [room(device, grid.num_tokens, TOKEN_BYTES) for grid in grids])


def random_batches(count: int, device: str) -> Iterator[Batch]:
    """Images and now and then a video chunk, of few and of more patches."""
    generator = np.random.default_rng(7)
    for seed in range(count):
        sides = 2 * generator.integers(1, 9, (generator.integers(1, 6), 2))
        frames = generator.choice([1, 1, 1, 3], len(sides))
        yield batch_of([Grid(int(t), int(h), int(w)) for t, (h, w) in zip(frames, sides, strict=True)], device, seed)


def load(device: str, *, has_graphs: bool = False) -> Runner:
    group = TPGroup.single(device)
    runner = Runner.load(GOLDEN / "tiny-k3-bf16", spec_of("tiny-k3"), dtype="bfloat16", group=group)
    if has_graphs:
        assert runner.capture(TIERS) == TIERS
    return runner


@pytest.mark.parametrize(("device", "has_graphs"), DEVICES)
def test_two_batches_in_flight_give_the_bits_of_one_at_a_time(device: str, has_graphs: bool) -> None:
    runner = load(device, has_graphs=has_graphs)
    batches = list(random_batches(50, device))
    expected = []
    for batch in batches:
        runner.encode(*batch.parts)
        expected.append([output.copy() for output in batch.outputs])
        for output in batch.outputs:
            output[:] = 0
    pendings = []
    for batch in batches:
        pendings.append(runner.start(*batch.parts))
        if len(pendings) > 1:
            pendings[-2].finish()
    reports = [pending.finish() for pending in pendings]  # once more: it only waits
    for batch, outputs in zip(batches, expected, strict=True):
        assert all(map(np.array_equal, batch.outputs, outputs))
    assert {report.non_finite for report in reports} == {()}
    assert {report.is_graphed for report in reports} == {False, has_graphs}  # video chunks run eagerly
    assert all(report.forward_s > 0 and report.all_gather_s >= 0 for report in reports)


@pytest.mark.parametrize(("device", "has_graphs"), DEVICES)
def test_a_poisoned_image_is_named_in_its_own_batch(device: str, has_graphs: bool) -> None:
    runner = load(device, has_graphs=has_graphs)
    batches = [batch_of([Grid(1, 4, 4)] * 3, device, seed) for seed in range(3)]
    table = runner._model.pos_emb.data.clone()
    pendings = []
    for number, batch in enumerate(batches):
        runner._model.pos_emb.data.fill_(float("nan") if number == 1 else 0.0)  # in the order of the computation
        pendings.append(runner.start(*batch.parts))
    runner._model.pos_emb.data.copy_(table)
    assert [pending.finish().non_finite for pending in pendings] == [(), (0, 1, 2), ()]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_seconds_run_between_marks(device: str) -> None:
    streams = streams_of(torch.device(device))
    first = streams.mark()
    x = to_device(torch.ones(1000, 1000), torch.device(device))
    for _ in range(10):
        x = x @ x / 1000
    second = streams.mark()
    second.wait()
    assert first.is_past() and second.is_past()
    assert second.seconds_since(first) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("has_graphs", [False, True])
def test_no_start_waits_for_the_device(has_graphs: bool) -> None:
    runner = load("cuda", has_graphs=has_graphs)
    batches = list(random_batches(6, "cuda"))
    runner.encode(*batches[0].parts)
    torch.cuda.set_sync_debug_mode("error")
    try:
        pendings = [runner.start(*batch.parts) for batch in batches]  # sizes that were not met before among them
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert {pending.finish().non_finite for pending in pendings} == {()}


@pytest.mark.gpu
def test_copies_of_other_batches_run_beside_the_computation(tmp_path: Path) -> None:
    runner = load("cuda")
    batches = [batch_of([Grid(1, 128, 128)], "cuda", seed) for seed in range(4)]
    runner.encode(*batches[0].parts)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        pendings = [runner.start(*batch.parts) for batch in batches]
        for pending in pendings:
            pending.finish()
    profiled.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    for direction in ("HtoD", "DtoH"):
        copies = [event for event in events if event.get("cat") == "gpu_memcpy" and direction in event["name"]]
        pairs = itertools.product(copies, kernels)
        assert any(is_beside(copy, kernel) for copy, kernel in pairs), direction


def is_beside(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return bool(one["ts"] < other["ts"] + other["dur"] and other["ts"] < one["ts"] + one["dur"])
