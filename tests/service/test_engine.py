"""The engine with decode processes of its own and a rank that the test plays."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from playing import MODEL, Hung, encode, run_engine
from running import is_alive, until

from service import dispatch, waiting
from service import engine as module
from service.decoders import DecoderPool, DecoderStartError
from service.engine import Engine
from service.errors import WorkersLost
from service.record import RequestRecord
from service.tokens import Embeddings
from tp.settings import Settings, load_settings
from tp.spec import read_spec


def test_a_start_that_fails_when_the_groups_are_launched_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        engine = Engine(load_settings(flags={"model.path": MODEL, "parallel.device": "cpu"}).settings, read_spec(MODEL))
        launched: list[int] = []

        async def fail(pool: DecoderPool) -> None:
            await until(lambda: engine.child_pids != set())
            launched.extend(engine.child_pids)
            raise DecoderStartError("no memory")

        monkeypatch.setattr(DecoderPool, "start", fail)
        with pytest.raises(DecoderStartError, match="no memory"):
            await engine.start()
        assert launched and not any(map(is_alive, launched))

    asyncio.run(main())


def test_many_images_of_one_request_do_not_keep_others_waiting(tmp_path: Path) -> None:
    async def use(engine: Engine, settings: Settings) -> None:
        record = RequestRecord()
        many, one = (asyncio.create_task(encode(engine, *rest)) for rest in ((60, record), ()))
        await one
        assert not record.is_admitted  # its headers are still read
        assert len((await many).plans) == 60

    run_engine(tmp_path, use)


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
    run_engine(tmp_path, use, **limits)
