"""HTTP handlers that hand embeddings to an LLM engine and answer with the geometry alone. Each exists where configured.

They are like `service.routes`' in everything else: keys, limits, admission, deadlines, errors, what is counted.
"""

import os
import uuid
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Annotated, Any

import orjson
from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field

from service import schemas
from service.admission import HeldBytes
from service.engine import Encoded, EncodeOptions
from service.errors import InvalidRequest, ServiceError
from service.handoff.sglang import message_of
from service.handoff.vllm_cache import ID_PATTERN, EncoderCache
from service.openapi import CACHE_OPENAPI, SGLANG_OPENAPI, SGLANG_PATH, error_responses
from service.routes import (
    answer_context,
    as_response,
    check_key,
    engine_of,
    keep_settings,
    record_of,
    settings_of,
    take_images,
    unless_gone,
)
from service.tokens import TokenOptions
from service.unpack import LIST_NAMES, SGLangOptions
from tp.settings import HandoffSettings
from tp.spec import Dtype

if TYPE_CHECKING:
    from service.handoff.push import Pusher

_BEFORE = [Depends(keep_settings), Depends(check_key)]


class HandoffError(ValueError):
    """A hand-off is configured and cannot be had here."""


class HandedOff(BaseModel):
    """The answer: what became of the images whose embeddings are with the engine."""

    id: str
    model: str
    dtype: Dtype
    images: list[schemas.ImageGeometry]


class CacheQuery(BaseModel):
    """Options of POST /v1/encoder_cache."""

    model_config = ConfigDict(extra="forbid")

    id: list[Annotated[str, Field(pattern=ID_PATTERN)]] = Field(
        min_length=1,
        description="What vLLM will call each image, in order: the `uuid` of its part in the chat request.",
    )
    dtype: Dtype | None = Field(None, description="Default: the compute dtype. The language model's is wanted.")


class _SGLangRoute(APIRoute):
    """SGLang shows its users what an error's body has as `message`, outside of OpenAI's error object."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_and_tell(request: Request) -> Response:
            try:
                return await handle(request)
            except ServiceError as error:
                error.beside["message"] = error.message
                raise

        return handle_and_tell


vllm_router = APIRouter(prefix="/v1", dependencies=_BEFORE)
sglang_router = APIRouter(dependencies=_BEFORE, route_class=_SGLangRoute)


def include_handoffs(app: FastAPI, settings: HandoffSettings) -> None:
    """Add the routes of what is configured."""
    if settings.vllm_encoder_cache_dir is not None:
        app.include_router(vllm_router)
    if settings.sglang_receivers:
        app.include_router(sglang_router)


def prepare_handoffs(app: FastAPI, settings: HandoffSettings) -> None:
    """Put what the routes need into the application's state. Raises HandoffError."""
    folder = settings.vllm_encoder_cache_dir
    if folder is not None:
        if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            raise HandoffError(f"handoff.vllm_encoder_cache_dir {folder} is not a folder that can be written to")
        app.state.encoder_cache = EncoderCache(folder, timeout_s=settings.timeout_s)
    if settings.sglang_receivers:
        try:
            from service.handoff.push import Pusher  # noqa: PLC0415 - an extra, which nothing else needs
        except ModuleNotFoundError as error:
            raise HandoffError(
                f"handoff.sglang_receivers needs the package {error.name}: pip install 'tpvision[sglang]'"
            ) from error
        app.state.pusher = Pusher(settings.sglang_receivers, timeout_s=settings.timeout_s)


@vllm_router.post("/encoder_cache", responses=error_responses(), openapi_extra=CACHE_OPENAPI, response_model=HandedOff)
async def write_encoder_cache(request: Request, query: Annotated[CacheQuery, Query()]) -> Response:
    """Merged vision tokens into vLLM's encoder cache, each image's under its id, in place of what is there.

    The body is that of POST /v1/encode. vLLM counts an image's tokens by the model's rule, so an image over the top
    tier is always refused and never downscaled.
    """
    engine = engine_of(request)
    record_of(request).form = "json"
    cache: EncoderCache = request.app.state.encoder_cache
    if len(set(query.id)) != len(query.id):
        raise InvalidRequest("two images of one id", param="id")
    async with take_images(request, "encode") as intake:
        if len(intake.images) != len(query.id):
            raise InvalidRequest(
                f"{len(query.id)} ids for {len(intake.images)} images",
                param="id",
                numbers={"num_ids": len(query.id), "num_images": len(intake.images)},
            )
        options = EncodeOptions(
            settings=settings_of(request), policy="refuse", tokens=TokenOptions(query.dtype or engine.dtype)
        )
        encoded = await unless_gone(request, engine.encode(intake.images, options, record_of(request)))
    # The request's own id is the client's to choose, and two may have the same.
    work = cache.write(query.id, encoded.embeddings, tag=uuid.uuid4().hex)
    return await _hand_off(request, encoded, work)


@sglang_router.post(SGLANG_PATH, responses=error_responses(), openapi_extra=SGLANG_OPENAPI, response_model=HandedOff)
async def push_to_sglang(request: Request) -> Response:
    """Merged vision tokens to an SGLang server without an encoder, pushed over ZeroMQ before this answers.

    What its `--encoder-urls` call, under the transfer backend zmq_to_tokenizer.
    """
    engine = engine_of(request)
    record_of(request).form = "json"
    pusher: Pusher = request.app.state.pusher
    settings = settings_of(request)
    async with take_images(request, "sglang") as intake:
        assert intake.unpacked is not None and isinstance(intake.unpacked.options, SGLangOptions)
        part = intake.unpacked.options
        receiver = pusher.receiver(part.prefill_host, part.embedding_port)
        options = EncodeOptions(
            settings=settings,
            policy=settings.capacity.policy,
            tokens=TokenOptions(engine.dtype),
            param=LIST_NAMES["sglang"],
        )
        encoded = await unless_gone(request, engine.encode(intake.images, options, record_of(request)))
    message = message_of(part, encoded.embeddings, encoded.plans, with_sizes=engine.spec.family == "Kimi K3")
    return await _hand_off(request, encoded, pusher.push(receiver, message))


async def _hand_off(request: Request, encoded: Encoded, work: Coroutine[Any, Any, None]) -> Response:
    """The answer, when the work is done; until then the embeddings count as bytes in flight."""
    engine = engine_of(request)
    with HeldBytes(engine.admission) as held, record_of(request).stage("encode_response"):
        held.add_unchecked(encoded.embeddings.values.nbytes)
        await unless_gone(request, work)
    context = answer_context(request, engine)
    body = {
        "id": context.request_id,
        "model": context.model,
        "dtype": encoded.embeddings.dtype,
        "images": schemas.geometry(encoded.plans, encoded.embeddings.bounds, context.spec),
    }
    return as_response(request, schemas.Answer([orjson.dumps(body)], "application/json", {}))
