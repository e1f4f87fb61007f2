"""The engine with decode processes of its own and a rank that the test plays."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from playing import GOOD, MODEL, Hung, encode, run_engine
from running import is_alive, until
from starlette.types import Receive, Scope, Send

from service import dispatch, waiting
from service import engine as module
from service import loan as lending
from service.app import create_app
from service.decoders import DecoderPool, DecoderStartError
from service.engine import Engine
from service.errors import WorkersLost
from service.loan import Loan
from service.record import RequestRecord
from service.reporter import Reporter
from service.schemas import FORMS
from service.tokens import Embeddings, TokenOptions
from tp.settings import Settings, load_settings
from tp.slab import Run
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


LENDING = {"TPVISION_CAPACITY__PATCH_CAPACITIES": "24", "TPVISION_CAPACITY__SLAB_PATCHES": "48"}  # two such images


@pytest.fixture
def lends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small it is, and for longer than a test takes."""
    monkeypatch.setattr(module, "LOAN_BYTES", 0)
    monkeypatch.setattr(lending, "_LOAN_S", 60)


@pytest.mark.usefixtures("lends_all")
def test_tokens_of_one_image_are_lent_while_another_one_has_room(tmp_path: Path) -> None:
    async def use(engine: Engine, settings: Settings) -> None:
        engine.slab.tokens(Run(0, 48), 12)[:] = np.arange(12)[:, None]
        record = RequestRecord()
        lent = await encode(engine, record=record, may_lend=True)
        assert engine.admission.allocator.num_free == 24 and engine.requests.counts.answered == 1
        assert record.stages.keys() >= {"queue", "copy"}
        copied = await encode(engine, may_lend=True)
        assert isinstance(lent.embeddings.data, Loan) and isinstance(copied.embeddings.data, memoryview)
        assert engine.admission.allocator.num_free == 24
        row = lent.embeddings.values[0].nbytes
        assert bytes(lent.embeddings.data.take()) == b"".join(bytes([number]) * row for number in range(6))
        assert bytes(copied.embeddings.data) == b"".join(bytes([number]) * row for number in range(6, 12))
        assert engine.admission.allocator.num_free == 48

    run_engine(tmp_path, use, **LENDING)


@pytest.mark.usefixtures("lends_all")
def test_tokens_are_copied_out_where_the_room_beside_them_is_in_pieces(tmp_path: Path) -> None:
    async def use(engine: Engine, settings: Settings) -> None:
        allocator = engine.admission.allocator
        before, others = allocator.allocate([40, 16]) or []
        allocator.free(before)  # of which the image leaves 16 rows, and 8 are free behind the others'
        encoded = await encode(engine, may_lend=True)
        assert encoded.embeddings.loan is None
        allocator.free(others)

    run_engine(tmp_path, use, **{**LENDING, "TPVISION_CAPACITY__SLAB_PATCHES": "64"})


@pytest.mark.usefixtures("lends_all")
@pytest.mark.parametrize(
    ("num_images", "tokens", "cache"),
    [
        (2, TokenOptions("float32"), 0),
        (1, TokenOptions("bfloat16"), 0),
        (1, TokenOptions("float32", pooled=True), 0),
        (1, TokenOptions("float32", normalize=True), 0),
        (1, TokenOptions("float32"), 100_000),
    ],
)
def test_what_is_not_one_image_as_it_is_is_copied_out(
    tmp_path: Path, num_images: int, tokens: TokenOptions, cache: int
) -> None:
    async def use(engine: Engine, settings: Settings) -> None:
        encoded = await encode(engine, num_images, tokens=tokens, may_lend=True)
        assert encoded.embeddings.loan is None
        assert engine.admission.allocator.num_free == settings.slab_patches

    run_engine(tmp_path, use, TPVISION_CACHE__MAX_BYTES=str(cache))


@pytest.mark.usefixtures("lends_all")
@pytest.mark.parametrize("accept", FORMS)
@pytest.mark.parametrize("loan_s", [0, 60])
def test_lent_tokens_are_the_same_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accept: str, loan_s: float
) -> None:
    monkeypatch.setattr(lending, "_LOAN_S", loan_s)
    monkeypatch.setattr(lending, "_PIECE_BYTES", 1000)
    tokens = np.random.default_rng(0).random((6, 128), np.float32)

    async def use(engine: Engine, settings: Settings) -> None:
        engine.slab.tokens(Run(0, 24), 6)[:] = tokens.view(np.uint8)
        app = create_app(settings, engine, Reporter(engine.metrics, None))

        async def with_state(scope: Scope, receive: Receive, send: Send) -> None:
            await app({**scope, "state": {}}, receive, send)

        async with httpx.AsyncClient(transport=httpx.ASGITransport(with_state), base_url="http://test") as client:
            lent = await client.post("/v1/encode", content=GOOD, headers={"accept": accept})
            monkeypatch.setattr(module, "LOAN_BYTES", 2**30)
            copied = await client.post("/v1/encode", content=GOOD, headers={"accept": accept})
        assert lent.status_code == 200
        assert tokens.tobytes() in lent.content or accept == "application/json"
        assert lent.headers["etag"] == copied.headers["etag"]
        assert [lent.headers["content-length"]] * 2 == [copied.headers["content-length"], str(len(lent.content))]
        await until(lambda: engine.admission.bytes_in_flight == 0)

    run_engine(tmp_path, use)
