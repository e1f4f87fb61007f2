"""What becomes of a batch whose rank hangs or dies, with an engine and a rank that the test plays."""

import asyncio
import time
from pathlib import Path

import pytest
from playing import Hung, encode, join, run_engine
from running import until, wait_until

from service import dispatch
from service.engine import Engine
from service.errors import WorkersLost
from tp import wire
from tp.settings import Settings


def test_a_hang_in_the_first_batch_is_noticed_by_the_rate_of_the_warm_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_HANG_FLOOR_S", 0.5)
    monkeypatch.setattr(dispatch, "_GONE_TIMEOUT_S", 0.2)
    hung = Hung()

    async def use(engine: Engine, settings: Settings) -> None:
        answer = asyncio.create_task(encode(engine))
        await until(lambda: engine.state != "ready")
        hung.goes_on.set()
        join(settings, "second")
        await answer

    run_engine(tmp_path, use, hung.hear)


def test_what_a_stopped_rank_elsewhere_had_runs_again_in_other_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_GONE_TIMEOUT_S", 0.2)
    hung = Hung()
    again: list[wire.Message] = []

    async def use(engine: Engine, settings: Settings) -> None:
        answer = asyncio.create_task(encode(engine))
        await until(lambda: engine.state != "ready")
        (old,) = hung.batches[0].images
        pixels = engine.slab.pixels(old.run).copy()
        join(settings, "second", again.append)
        tokens = (await answer).embeddings
        assert len(tokens.values) == old.grid.num_tokens
        assert isinstance(again[0], wire.Batch)
        (new,) = again[0].images
        assert new.run.start >= old.run.end and new.grid == old.grid
        assert (engine.slab.pixels(new.run) == pixels).all() and pixels.any()
        assert engine.admission.allocator.num_free == settings.slab_patches - old.run.num_patches  # it may write there
        hung.goes_on.set()

    run_engine(tmp_path, use, hung.hear, TPVISION_LIMITS__BATCH_TIMEOUT_S="0.5")


def test_what_was_in_flight_at_a_loss_runs_again_with_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(dispatch._BATCHES_IN_FLIGHT, "cpu", 2)
    engines: list[Engine] = []
    seen: list[int] = []

    def num_in_flight() -> int:
        return sum(len(group._waiting) for group in engines[0]._groups.ready)

    def die(message: wire.Message) -> None:
        wait_until(lambda: num_in_flight() == 2)
        raise OSError

    def look(message: wire.Message) -> None:
        if isinstance(message, wire.Batch):
            time.sleep(0.2)  # for a second one to come, if it does
            seen.append(num_in_flight())

    async def use(engine: Engine, settings: Settings) -> None:
        engines.append(engine)
        answers = [asyncio.create_task(encode(engine)) for _ in range(2)]
        await until(lambda: engine.state != "ready")
        join(settings, "second", look)
        await asyncio.gather(*answers)
        assert seen == [1, 1]

    run_engine(tmp_path, use, die, TPVISION_CAPACITY__PATCH_CAPACITIES="24")


def test_what_a_stopped_rank_elsewhere_had_is_told_so_where_no_rows_are_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_GONE_TIMEOUT_S", 0.2)
    hung = Hung()

    async def use(engine: Engine, settings: Settings) -> None:
        with pytest.raises(WorkersLost):
            await encode(engine)
        hung.goes_on.set()

    limits = {"TPVISION_LIMITS__BATCH_TIMEOUT_S": "0.5", "TPVISION_CAPACITY__SLAB_PATCHES": "24"}
    run_engine(tmp_path, use, hung.hear, **limits, TPVISION_CAPACITY__PATCH_CAPACITIES="24")
