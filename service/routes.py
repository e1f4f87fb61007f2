"""HTTP handlers: read the request, call `Engine.encode`, shape the answer. No image byte is looked at here."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from service import schemas
from service.admission import HeldBytes
from service.body import Body, Item, receive_body, receive_multipart
from service.content_keys import Key, entity_tag, is_known
from service.decoders import UnpackedBody
from service.engine import Encoded, EncodeOptions, Engine
from service.errors import InvalidRequest, ModelNotFound, Unauthorized
from service.fetch import Fetcher
from service.geometry import ImagePlan, effective_policy
from service.keys import KeyRing
from service.openapi import BEFORE_ROUTES, EMBEDDINGS_OPENAPI, ENCODE_OPENAPI, MODELS_RESPONSE, error_responses
from service.record import RequestRecord
from service.tokens import TokenOptions
from service.unpack import LIST_NAMES, EmbeddingsOptions, Route
from service.waiting import off_loop
from tp.settings import Settings
from tp.spec import ITEMSIZE, Dtype

Result = TypeVar("Result")

_JOINED_BYTES = 2**16  # a smaller answer is sent in one piece: each one more wakes the client up once more


class PolicyQuery(BaseModel):
    """Options of every route that takes images."""

    model_config = ConfigDict(extra="forbid")

    oversize: Literal["refuse", "downscale"] | None = Field(
        None, description="What happens to an image over the top tier; default and permission are the operator's."
    )
    normalize: bool = Field(False, description="Scale every vector of the answer to unit length.")


class EncodeQuery(PolicyQuery):
    """Options of POST /v1/encode."""

    dtype: Dtype | None = Field(
        None, description="Default: the compute dtype, but float32 in JSON, in npy and for pooled vectors."
    )
    output: Literal["tokens", "pooled"] = Field("tokens", description="All merged tokens, or their mean in float32.")
    encoding_format: Literal["float", "base64"] = Field("float", description="How JSON holds the numbers.")


class GoneError(Exception):
    """The client hung up; there is nobody to answer."""


class PartsResponse(Response):
    """A body sent piece by piece, where it is large; `on_end` is called when it is sent or given up."""

    def __init__(self, answer: schemas.Answer, headers: Mapping[str, str], on_end: Callable[[], None]) -> None:
        super().__init__(media_type=answer.media_type, headers={**answer.headers, **headers})
        self.headers["content-length"] = str(answer.num_bytes)
        self._answer = answer
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI: the start message, then one body message a piece."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            last = b""
            if self._answer.num_bytes <= _JOINED_BYTES:
                last = b"".join(self._answer.pieces())
            else:  # sending waits for what was sent before: the last piece is empty, as the answer is held until then
                for piece in self._answer.pieces():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            self._answer.release()
            self._on_end()


@dataclass(frozen=True, slots=True)
class Intake:
    """The images and video chunks of one request, and what an embeddings body asks for beside them."""

    images: Sequence[Item]
    unpacked: UnpackedBody | None


def engine_of(request: Request) -> Engine:
    """The process's one engine."""
    return request.app.state.engine  # type: ignore[no-any-return]


def record_of(request: Request) -> RequestRecord:
    """What is noted of this request."""
    return request.state.record  # type: ignore[no-any-return]


async def check_key(request: Request) -> None:
    """Raise Unauthorized unless no keys are configured or the Bearer token is one of them."""
    keys: KeyRing | None = request.app.state.keys
    if keys is None:
        return
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not keys.holds(token.strip()):
        raise Unauthorized("this service needs an API key, as `Authorization: Bearer KEY`")


async def keep_settings(request: Request) -> None:
    """Whatever is reloaded meanwhile, a request is handled under the settings that it came under."""
    request.state.settings = engine_of(request).settings


def settings_of(request: Request) -> Settings:
    """Those in force when the request came."""
    return request.state.settings  # type: ignore[no-any-return]


router = APIRouter(prefix="/v1", dependencies=[Depends(keep_settings), Depends(check_key)])


@router.post("/encode", responses=error_responses(), openapi_extra=ENCODE_OPENAPI, response_class=Response)
async def encode(request: Request, query: Annotated[EncodeQuery, Query()]) -> Response:
    """Merged vision tokens of one or several images, or video chunks.

    The body is one raw image (any content type but the other two), a multipart form of files, or JSON, which may hold
    chunks of video frames too. `Accept` picks the form of the answer: safetensors (default), octet-stream, npy (one
    image) or JSON. `If-None-Match` with the `ETag` of an earlier answer gives 304, and nothing is encoded, where this
    one would have the same embeddings in the same form.
    """
    engine = engine_of(request)
    form = schemas.choose_form(",".join(request.headers.getlist("accept")))
    record_of(request).form = schemas.SHORT_NAMES[form]
    pooled = query.output == "pooled"
    dtype = query.dtype or ("float32" if pooled else schemas.default_dtype(form, engine.dtype))
    schemas.check_form(form, dtype)
    check_plans = _size_check(request, form, dtype, pooled=pooled, encoding=query.encoding_format)
    async with take_images(request, "encode") as intake:
        options = EncodeOptions(
            settings=settings_of(request),
            policy=_policy(request, query),
            tokens=TokenOptions(dtype, pooled, query.normalize),
            may_lend=form != "application/json",
            check_plans=check_plans,
        )

        async def identify() -> tuple[list[Key], str]:
            """The images' keys, and the ETag of their answer in this form."""
            keys = await engine.content_keys(intake.images, options, record_of(request))
            return keys, entity_tag(
                *(keys, engine.model_name, form, dtype, pooled, query.normalize, query.encoding_format),
                # What else may refuse the answer: who has the tag of one has it from under the same limits.
                *(options.settings.limits.max_json_bytes, engine.layout.num_patches),
            )

        known = ",".join(request.headers.getlist("if-none-match"))
        keys, tag = await identify() if known or options.settings.cache.max_bytes else (None, "")
        if known and is_known(tag, known):
            return Response(status_code=304, headers={"etag": tag})
        encoded = await unless_gone(request, engine.encode(intake.images, options, record_of(request), keys))
        if not tag:  # only now: who is refused need not wait for it
            _, tag = await identify()
    context = answer_context(request, engine)
    return await _respond(
        request,
        encoded,
        lambda: schemas.encode_embeddings(form, encoded.embeddings, encoded.plans, context, query.encoding_format),
        {"etag": tag},
    )


@router.post("/embeddings", responses=error_responses(), openapi_extra=EMBEDDINGS_OPENAPI, response_class=Response)
async def embeddings(request: Request, query: Annotated[PolicyQuery, Query()]) -> Response:
    """OpenAI's embeddings API over images: one mean vector an image, or with `pooling: none` its matrix of tokens."""
    engine = engine_of(request)
    record_of(request).form = schemas.SHORT_NAMES["application/json"]
    async with take_images(request, "embeddings") as intake:
        assert intake.unpacked is not None and isinstance(intake.unpacked.options, EmbeddingsOptions)
        asked = intake.unpacked.options
        _check_model(engine, asked.model)
        if asked.dimensions not in (None, engine.spec.text_hidden_size):
            raise InvalidRequest(
                f"this model's embeddings have {engine.spec.text_hidden_size} dimensions and cannot be shortened",
                param="dimensions",
                numbers={"dimensions": engine.spec.text_hidden_size},
            )
        pooled = asked.pooling == "mean"
        options = EncodeOptions(
            settings=settings_of(request),
            policy=_policy(request, query),
            tokens=TokenOptions("float32", pooled, query.normalize or asked.normalized),
            param="input",
            check_plans=_size_check(
                request, "application/json", "float32", pooled=pooled, encoding=asked.encoding_format
            ),
        )
        encoded = await unless_gone(request, engine.encode(intake.images, options, record_of(request)))
    context = answer_context(request, engine)
    return await _respond(
        request,
        encoded,
        lambda: schemas.openai_embeddings(encoded.embeddings, encoded.plans, context, asked.encoding_format),
    )


@router.get("/models", responses=MODELS_RESPONSE | error_responses(*BEFORE_ROUTES, 401, 429))
async def models(request: Request) -> dict[str, Any]:
    """The one model served, in OpenAI's shape."""
    engine = engine_of(request)
    model = {
        "id": engine.model_name,
        "object": "model",
        "created": int(request.app.state.started_at),
        "owned_by": "tpvision",
        "model_type": engine.spec.model_type,
        "dtype": engine.dtype,
        "dimensions": engine.spec.text_hidden_size,
    }
    return {"object": "list", "data": [model]}


@router.get("/capacity", responses=error_responses(*BEFORE_ROUTES, 401, 429))
async def capacity(request: Request) -> dict[str, Any]:
    """Tiers and what they measured, policy, memory per rank, legal world sizes, and what is in flight."""
    return engine_of(request).describe_capacity()


@contextlib.asynccontextmanager
async def take_images(request: Request, route: Route) -> AsyncIterator[Intake]:
    """The request's images in memory files that live as long as the block."""
    with contextlib.ExitStack() as stack:
        async with engine_of(request).taking():
            with record_of(request).stage("receive"):
                intake = await _take_in(request, route, stack)
        yield intake


async def _take_in(request: Request, route: Route, stack: contextlib.ExitStack) -> Intake:
    engine = engine_of(request)
    limits = settings_of(request).limits
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    held = stack.enter_context(HeldBytes(engine.admission))
    if content_type == "multipart/form-data" and route == "encode":
        body, parts = await receive_multipart(
            request,
            max_bytes=limits.max_body_bytes,
            max_images=limits.max_images_per_request,
            timeout_s=limits.body_timeout_s,
            on_bytes=held.add,
        )
        stack.enter_context(body)
        return Intake([part.image for part in parts], None)
    body = stack.enter_context(
        await receive_body(request, max_bytes=limits.max_body_bytes, timeout_s=limits.body_timeout_s, on_bytes=held.add)
    )
    if body.num_bytes == 0:
        raise InvalidRequest("the body is empty")
    if content_type == "application/json" or route != "encode":
        unpacked = await unless_gone(request, engine.unpack(body, route, limits))
        stack.enter_context(unpacked)
        held.add_unchecked(sum(image.length for image in unpacked.images))
        return Intake(await _fetch(request, unpacked, held, stack, route), unpacked)
    return Intake([body.image], None)


async def _fetch(
    request: Request,
    unpacked: UnpackedBody,
    held: HeldBytes,
    stack: contextlib.ExitStack,
    route: Route,
) -> Sequence[Item]:
    """The items of a JSON body; images that it gives as URLs are fetched into a body of the stack's."""
    if not unpacked.urls:
        return unpacked.items(unpacked.images)
    fetcher: Fetcher = request.app.state.fetcher
    images = dict(enumerate(unpacked.images))
    work = fetcher.fetch(
        {LIST_NAMES[route] + unpacked.names[index]: url for index, url in unpacked.urls.items()},
        stack.enter_context(Body()),
        max_bytes=settings_of(request).limits.max_body_bytes,
        inline_bytes=sum(image.length for index, image in images.items() if index not in unpacked.urls),
        on_bytes=held.add,
    )
    images |= zip(unpacked.urls, await unless_gone(request, work), strict=True)
    return unpacked.items(list(images.values()))


async def _respond(
    request: Request,
    encoded: Encoded,
    make: Callable[[], schemas.Answer],
    headers: Mapping[str, str] | None = None,
) -> Response:
    record = record_of(request)
    with record.stage("encode_response"):
        answer = await off_loop(make, num_bytes=encoded.embeddings.values.nbytes)
    return as_response(request, answer, headers)


def as_response(request: Request, answer: schemas.Answer, headers: Mapping[str, str] | None = None) -> Response:
    """The answer on its way, with the stages so far and `headers` beside its own."""
    record = record_of(request)
    timing = ", ".join(f"{stage};dur={seconds * 1000:.3f}" for stage, seconds in record.times_s.items())
    held = HeldBytes(engine_of(request).admission)
    held.add_unchecked(answer.num_bytes)  # it is computed: refusing it now would help nobody
    own = {"server-timing": timing, **(headers or {})}
    if settings_of(request).cache.max_bytes:
        own["cache-status"] = _cache_status(record)
    return PartsResponse(answer, own, held.release)


def _cache_status(record: RequestRecord) -> str:
    """RFC 9211, for all images of the request together."""
    num_encoded = len(record.plans) - record.num_cached - record.num_coalesced
    if record.num_cached == len(record.plans):
        return "tpvision; hit"
    status = f"tpvision; fwd={'partial' if record.num_cached else 'miss'}"
    return status if num_encoded else f"{status}; collapsed"


async def unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled as soon as the client hangs up. Raises GoneError then."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_hang_up(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise GoneError
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _hang_up(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _size_check(
    request: Request, form: schemas.Form, dtype: Dtype, *, pooled: bool, encoding: schemas.EncodingFormat
) -> Callable[[Sequence[ImagePlan]], None]:
    return lambda plans: schemas.check_size(
        form,
        plans,
        spec=engine_of(request).spec,
        itemsize=ITEMSIZE[dtype],
        pooled=pooled,
        encoding=encoding,
        limit=settings_of(request).limits.max_json_bytes,
    )


def _policy(request: Request, query: PolicyQuery) -> Literal["refuse", "downscale"]:
    capacity = settings_of(request).capacity
    return effective_policy(capacity.policy, capacity.allow_override, query.oversize)


def _check_model(engine: Engine, name: str | None) -> None:
    if name not in (None, engine.model_name):
        raise ModelNotFound(f"this service serves {engine.model_name}", param="model")


def answer_context(request: Request, engine: Engine) -> schemas.AnswerContext:
    return schemas.AnswerContext(record_of(request).request_id, engine.model_name, engine.spec)


__all__ = ["ClientDisconnect", "GoneError", "router"]
