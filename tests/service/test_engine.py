"""The engine with decode processes of its own and a rank that the test plays."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from playing import MODEL, join, played_settings
from running import GOLDEN, until, wait_until

from service import dispatch, waiting
from service import engine as module
from service.body import Body
from service.engine import Encoded, EncodeOptions, Engine
from service.errors import WorkersLost
from service.record import RequestRecord
from service.tokens import Embeddings, TokenOptions
from tp import wire
from tp.settings import Settings
from tp.spec import read_spec

GOOD = (GOLDEN / "images" / "rgb_64x48.png").read_bytes()
Use = Callable[[Engine, Settings], Awaitable[None]]


def run_engine(folder: Path, use: Use, on_message: Callable[[wire.Message], None], **environ: str) -> None:
    """Run `use` with an engine that is ready, and check that every request was answered and every row is free."""

    async def main() -> None:
        settings = played_settings(folder, environ)
        engine = Engine(settings, read_spec(MODEL))
        await engine.start()
        try:
            join(settings, "first", on_message)
            async with asyncio.timeout(30):
                await engine.ready.wait()
                await use(engine, settings)
                await until(lambda: engine.admission.allocator.num_free == settings.slab_patches)
            assert engine.requests.counts.accepted == engine.requests.counts.answered
        finally:
            await engine.stop()

    asyncio.run(main())


async def encode(engine: Engine, num_images: int = 1, record: RequestRecord | None = None) -> Encoded:
    with Body() as body:
        body.write(GOOD)
        options = EncodeOptions(engine.settings, policy="refuse", tokens=TokenOptions("float32"))
        return await engine.encode([body.image] * num_images, options, record or RequestRecord())


def test_many_images_of_one_request_do_not_keep_others_waiting(tmp_path: Path) -> None:
    async def use(engine: Engine, settings: Settings) -> None:
        record = RequestRecord()
        many, one = (asyncio.create_task(encode(engine, *rest)) for rest in ((60, record), ()))
        await one
        assert not record.is_admitted  # its headers are still read
        assert len((await many).plans) == 60

    run_engine(tmp_path, use, lambda message: None)


class Hung:
    """Ranks that hang in their first batch, like a stopped process: they hear nothing and hold on to the slab."""

    def __init__(self) -> None:
        self.batches: list[wire.Batch] = []
        self.goes_on = threading.Event()

    def hear(self, message: wire.Message) -> None:
        assert isinstance(message, wire.Batch)
        self.batches.append(message)
        self.goes_on.wait(20)


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


def test_who_waits_for_another_request_is_told_too_that_the_group_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_GONE_TIMEOUT_S", 0.2)
    hung = Hung()

    async def use(engine: Engine, settings: Settings) -> None:
        errors = await asyncio.gather(encode(engine), encode(engine), return_exceptions=True)
        assert [type(error) for error in errors] == [WorkersLost] * 2
        assert len(hung.batches) == len(hung.batches[0].images) == 1
        hung.goes_on.set()

    limits = {"TPVISION_LIMITS__BATCH_TIMEOUT_S": "0.5", "TPVISION_LIMITS__REQUEST_TIMEOUT_S": "2"}
    run_engine(tmp_path, use, hung.hear, **limits, TPVISION_CACHE__MAX_BYTES="100000")


def test_answers_from_the_cache_are_bounded_by_the_bytes_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    read_tokens = module.read_tokens

    def read_later(*arguments: Any, **options: Any) -> Embeddings:
        goes_on.wait(20)
        return read_tokens(*arguments, **options)

    async def use(engine: Engine, settings: Settings) -> None:
        num_bytes = (await encode(engine)).embeddings.values.nbytes
        assert settings.limits.max_inflight_bytes == 2 * num_bytes - 1
        monkeypatch.setattr(module, "read_tokens", read_later)
        monkeypatch.setattr(waiting, "SHORT_BYTES", 0)  # else so short an answer would hold up the loop
        answers = [asyncio.create_task(encode(engine)) for _ in range(5)]
        await until(lambda: sum(answer.done() for answer in answers) == 3)
        assert engine.admission.bytes_in_flight == 2 * num_bytes
        goes_on.set()
        outcomes = await asyncio.gather(*answers, return_exceptions=True)
        assert sorted(type(outcome).__name__ for outcome in outcomes) == [*["Encoded"] * 2, *["Overloaded"] * 3]
        assert engine.admission.bytes_in_flight == 0

    limits = {"TPVISION_LIMITS__MAX_INFLIGHT_BYTES": "6143", "TPVISION_CACHE__MAX_BYTES": "100000"}
    run_engine(tmp_path, use, lambda message: None, **limits)
