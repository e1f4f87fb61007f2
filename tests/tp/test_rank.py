"""The serve loop with a real slab, encoder and control socket: what is started when, and answered in which order."""

import contextlib
import logging
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from goldens import GOLDEN, spec_of
from running import wait_until

import tp.rank
from tp import wire
from tp.control import EXIT_FRONT_END_GONE, ControlClient
from tp.parallel import TPGroup
from tp.rank import choose_device, serve
from tp.runner import BatchError, Bytes, EncodeReport, Pending, Runner
from tp.settings import Settings
from tp.slab import Slab, SlabLayout
from tp.spec import Grid

SPEC = spec_of("tiny-k3")
GRIDS = [Grid(1, 4, 6), Grid(1, 2, 2), Grid(2, 4, 4), Grid(1, 8, 2)]
MAX_PATCHES = 64


class LateRunner(Runner):
    """Encodes in the order of starts, each when `device` is let go: the host goes on meanwhile, as with a GPU."""

    def prepare(self, events: list[str]) -> None:
        self.events = events
        self.device = threading.Semaphore(0)
        self._thread = ThreadPoolExecutor(1)

    def start(self, grids: Sequence[Grid], pixels: Sequence[Bytes], outputs: Sequence[Bytes] | None = None) -> Pending:
        self._check(grids, pixels, outputs)
        self.events.append("start")
        future = self._thread.submit(self._encode_late, grids, pixels, outputs)
        return LatePending(future, self.events)  # type: ignore[return-value]

    def close(self) -> None:
        self.device.release(99)
        self._thread.shutdown()

    def _encode_late(self, *batch: Any) -> EncodeReport:
        self.device.acquire()
        return super().start(*batch).finish()


@dataclass
class LatePending:
    future: "Future[EncodeReport]"
    events: list[str]

    def is_done(self) -> bool:
        return self.future.done()

    def finish(self) -> EncodeReport:
        report = self.future.result(20)
        self.events.append("answer")
        return report


class Served:
    """A rank that serves in a thread, and our end of its control socket."""

    def __init__(self, runner: Runner, group: TPGroup) -> None:
        self.runner = runner
        self.slab = Slab.create(SlabLayout.of(SPEC, num_patches=256, itemsize=4))
        self.slab.buffer[:] = np.random.default_rng(0).integers(0, 256, self.slab.buffer.size, np.uint8)
        ours, theirs = socket.socketpair()
        ours.settimeout(20)
        self.front_end, self._control = ControlClient(ours), ControlClient(theirs)
        self._thread = ThreadPoolExecutor(1)
        self.status = self._thread.submit(serve, self._control, self.slab, runner, group, MAX_PATCHES)

    def tokens(self, batch: wire.Batch) -> list[Bytes]:
        return [self.slab.tokens(image.run, image.grid.num_tokens) for image in batch.images]

    def send(self, *messages: wire.Message) -> None:
        for message in messages:
            self.front_end.send(message)

    def receive_done(self) -> wire.Done:
        message = self.front_end.receive()
        assert isinstance(message, wire.Done)
        return message

    def close(self) -> None:
        self.front_end.close()
        self._thread.shutdown()
        self._control.close()
        self.slab.close()


@contextlib.contextmanager
def served(runner: Runner, group: TPGroup | None = None) -> Iterator[Served]:
    each = Served(runner, group or TPGroup.single())
    try:
        yield each
    finally:
        if isinstance(runner, LateRunner):
            runner.close()
        each.close()


def load(kind: type[Runner] = Runner, group: TPGroup | None = None, **more: Any) -> Any:
    return kind.load(GOLDEN / "tiny-k3-f32", SPEC, dtype="float32", group=group or TPGroup.single(), **more)


@pytest.fixture
def late() -> LateRunner:
    runner: LateRunner = load(LateRunner)
    runner.prepare([])
    return runner


def batch_of(batch_id: int, *grids: Grid, first_row: int = 0, mode: Any = "tp") -> wire.Batch:
    images = []
    for grid in grids:
        images.append(wire.BatchImage(start=first_row, t=grid.t, h=grid.h, w=grid.w))
        first_row += grid.num_patches
    return wire.Batch(batch_id=batch_id, images=images, mode=mode)


FIRST, SECOND, THIRD = (batch_of(1, *GRIDS[:2]), batch_of(2, *GRIDS[2:], first_row=64), batch_of(3, GRIDS[0]))


def alone(each: Served, batch: wire.Batch) -> list[Bytes]:
    """The tokens of a batch that nothing runs beside."""
    outputs = [np.zeros_like(tokens) for tokens in each.tokens(batch)]
    load().encode(
        [image.grid for image in batch.images], [each.slab.pixels(image.run) for image in batch.images], outputs
    )
    return outputs


def assert_encoded(each: Served, *batches: wire.Batch) -> None:
    for batch in batches:
        assert all(map(np.array_equal, each.tokens(batch), alone(each, batch)))


def test_batches_sent_back_to_back_are_answered_in_their_order() -> None:
    with served(load()) as each:
        each.send(FIRST, SECOND, wire.Stop())
        assert [each.receive_done().batch_id for _ in range(2)] == [1, 2]
        assert each.status.result(20) == 0
        assert_encoded(each, FIRST, SECOND)


def test_the_next_batch_is_started_before_the_one_that_runs_is_answered(late: LateRunner) -> None:
    with served(late) as each:
        each.send(FIRST, SECOND)
        wait_until(lambda: late.events == ["start", "start"])
        late.device.release(2)
        dones = [each.receive_done() for _ in range(2)]
        each.send(wire.Stop())
        assert each.status.result(20) == 0
        assert [done.batch_id for done in dones] == [1, 2]
        assert all(done.forward_s > 0 and done.non_finite == [] for done in dones)
        assert_encoded(each, FIRST, SECOND)


def test_a_batch_that_comes_while_one_runs_is_started_at_once(late: LateRunner) -> None:
    with served(late) as each:
        each.send(FIRST)
        wait_until(lambda: late.events == ["start"])
        each.send(SECOND)
        wait_until(lambda: late.events == ["start", "start"])


def test_a_rank_is_never_two_batches_ahead(late: LateRunner) -> None:
    with served(late) as each:
        each.send(FIRST, SECOND, THIRD)
        wait_until(lambda: late.events == ["start", "start"])
        late.device.release()
        assert each.receive_done().batch_id == 1
        wait_until(lambda: late.events == ["start", "start", "answer", "start"])
        late.device.release(2)
        assert [each.receive_done().batch_id for _ in range(2)] == [2, 3]


def test_a_lone_batch_is_answered_though_nothing_follows(late: LateRunner) -> None:
    with served(late) as each:
        each.send(FIRST)
        late.device.release()
        assert each.receive_done().batch_id == 1


@pytest.mark.parametrize(
    ("next_one", "error"),
    [
        (batch_of(2, Grid(1, 4, 18)), wire.WireError),  # over the top tier
        (batch_of(2, Grid(5, 2, 2)), BatchError),  # more frames than the encoder takes
        (wire.Refused(reason="?"), wire.WireError),
    ],
)
def test_a_batch_that_cannot_be_started_costs_the_one_before_no_answer(
    late: LateRunner, next_one: wire.Message, error: type[Exception]
) -> None:
    with served(late) as each:
        each.send(FIRST, next_one)
        late.device.release()
        assert each.receive_done().batch_id == 1
        assert isinstance(each.status.exception(20), error)
        assert_encoded(each, FIRST)


def test_told_to_stop_it_answers_what_it_has(late: LateRunner) -> None:
    with served(late) as each:
        each.send(FIRST, wire.Stop())
        late.device.release()
        assert each.receive_done().batch_id == 1
        assert each.status.result(20) == 0


def test_without_a_front_end_it_ends_whatever_runs(late: LateRunner) -> None:
    with served(late) as each:
        each.send(FIRST, SECOND)
        wait_until(lambda: late.events == ["start", "start"])
        late.device.release()
        assert each.receive_done().batch_id == 1
        each.front_end.close()
        assert each.status.result(20) == EXIT_FRONT_END_GONE


def test_in_data_parallel_mode_a_rank_writes_its_own_images_and_names_them_by_the_batch() -> None:
    group = TPGroup(rank=1, world_size=2, device=TPGroup.single().device)
    batch = batch_of(1, *GRIDS[:3], mode="dp")
    with served(load(group=group, resident="full"), group) as each:
        before = [tokens.copy() for tokens in each.tokens(batch)]
        expected = alone(each, batch)
        each.send(batch)
        assert each.receive_done().non_finite == []
        is_mine = [np.array_equal(*pair) for pair in zip(each.tokens(batch), expected, strict=True)]
        is_left = [np.array_equal(*pair) for pair in zip(each.tokens(batch), before, strict=True)]
        assert sorted(is_mine) == [False, False, True] or sorted(is_mine) == [False, True, True]
        assert is_left == [not mine for mine in is_mine]
        each.runner._whole.projector.fc1.weight.fill_(float("nan"))  # type: ignore[union-attr]
        each.send(batch)
        assert each.receive_done().non_finite == [index for index, mine in enumerate(is_mine) if mine]


@pytest.mark.parametrize(
    ("gpus", "visible", "is_told"),
    [(["nvidia0", "nvidiactl"], "1", True), (["nvidia0", "nvidiactl"], "", False), ([], "0", False)],
    ids=["fewer GPUs than ranks", "GPUs hidden on purpose", "no GPU"],
)
def test_a_rank_without_its_gpu_says_so(
    gpus: list[str],
    visible: str,
    is_told: bool,
    *,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name in gpus:
        (tmp_path / name).touch()
    monkeypatch.setattr(tp.rank, "_DEVICE_FILES", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with caplog.at_level(logging.WARNING):
        assert choose_device(Settings()) == torch.device("cpu")
    assert ("torch sees no GPU, but there are nvidia0 here (CUDA_VISIBLE_DEVICES=1)" in caplog.text) == is_told
