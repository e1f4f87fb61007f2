"""Answers: which form a request asks for, and how embeddings and geometry are written in it. Pure.

Every form carries the same `images` list (`ImageGeometry`) and the same embedding bytes, so forms of the same dtype
agree bit for bit. Answers are lists of buffers that are sent one after the other: binary ones as they are, and JSON as
it is made, piece by piece, so that the event loop has its turn meanwhile.
"""

import base64
import io
import json
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import orjson
from pydantic import BaseModel, Field

from service.errors import InvalidRequest, NotAcceptable, ResponseTooLarge, TooManyImagesForForm
from service.geometry import ImagePlan
from service.loan import Loan
from service.prompts import prompt_text
from service.safetensors_header import DTYPE_NAMES
from service.tokens import Embeddings, to_float32
from tp.spec import ITEMSIZE, Dtype, EncoderSpec

Form = Literal["application/vnd.safetensors", "application/octet-stream", "application/x-npy", "application/json"]
EncodingFormat = Literal["float", "base64"]

FORMS: tuple[Form, ...] = (
    "application/vnd.safetensors",  # the default: first among equals
    "application/octet-stream",
    "application/x-npy",
    "application/json",
)
SHORT_NAMES: dict[Form, str] = {  # in metrics and logs
    "application/vnd.safetensors": "safetensors",
    "application/octet-stream": "octet-stream",
    "application/x-npy": "npy",
    "application/json": "json",
}
GEOMETRY_HEADER = "x-tpvision-images"
METADATA_HEADER = "metadata"
MAX_HEADER_BYTES = 7000  # of the two together; clients and proxies refuse more than 8 KiB
JSON_FLOAT_BYTES = 12  # of one number in a JSON answer, comma included, on average (measured 11.6 for unit normals)
_PIECE_BYTES = 2**20  # of a JSON answer: 3 ms in which nobody else has the interpreter

Part = bytes | memoryview | Loan


class ImageGeometry(BaseModel):
    """What became of one image or video chunk, in every answer. Sizes are [width, height] in pixels."""

    grid_thw: list[int] = Field(description="Patches: frames, rows, columns.")
    num_tokens: int = Field(description="Merged tokens: what an LLM's prompt needs, h/2 * w/2.")
    start: int = Field(description="First row of this image in the embeddings of the whole request.")
    end: int = Field(description="The row after its last.")
    original_size: list[int] = Field(description="As decoded, upright where orientation is applied; of one frame.")
    encoded_size: list[int] = Field(description="After the resize.")
    padded_size: list[int] = Field(description="After padding to multiples of 28.")
    downscaled: bool = Field(description="Whether the capacity, not the model's own rule, made it smaller.")
    patches: int = Field(description="Patches, t * h * w.")
    tier: int = Field(description="Smallest capacity tier that holds this image alone.")
    prompt: str | None = Field(
        description="What stands for it in the language model's prompt, where known; its one <|media_pad|> is repeated "
        "num_tokens times. The start time of a video chunk goes before it."
    )


class Usage(BaseModel):
    """Counts in OpenAI's words; both are the number of merged tokens."""

    prompt_tokens: int
    total_tokens: int


EmbeddingValue = list[list[float]] | list[float] | str


class EncodedImage(ImageGeometry):
    """One image of a JSON answer."""

    embedding: EmbeddingValue = Field(description="Token matrix, pooled vector, or base64 of its bytes in `dtype`.")
    shape: list[int] | None = Field(None, description="With base64 tokens: [num_tokens, hidden].")


class EncodeAnswer(BaseModel):
    """JSON answer of POST /v1/encode."""

    id: str
    object: Literal["tpvision.encoding"]
    created: int
    model: str
    dtype: Dtype
    images: list[EncodedImage]
    usage: Usage


class OpenAIEmbedding(BaseModel):
    """One entry of OpenAI's list."""

    object: Literal["embedding"]
    index: int
    embedding: EmbeddingValue
    shape: list[int] | None = None


class EmbeddingsAnswer(BaseModel):
    """JSON answer of POST /v1/embeddings."""

    object: Literal["list"]
    data: list[OpenAIEmbedding]
    model: str
    usage: Usage
    images: list[ImageGeometry] = Field(description="Ours, beside OpenAI's fields: what became of each image.")


class ErrorDetail(BaseModel):
    """The OpenAI error object; the numbers of the case stand beside these fields."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(BaseModel):
    """The body of every error."""

    error: ErrorDetail


@dataclass(frozen=True, slots=True)
class AnswerContext:
    """What an answer says of itself."""

    request_id: str
    model: str
    spec: EncoderSpec


@dataclass(frozen=True, slots=True)
class Answer:
    """A body in parts, its media type and its own headers."""

    parts: Sequence[Part]
    media_type: str
    headers: Mapping[str, str]

    @property
    def num_bytes(self) -> int:
        """Length of the body."""
        return sum(len(part) for part in self.parts)

    def pieces(self) -> Iterator[bytes | memoryview]:
        """The body, to be sent one piece after the other; once."""
        for part in self.parts:
            if isinstance(part, Loan):
                while piece := part.take():
                    yield piece
            else:
                yield part

    def release(self) -> None:
        """No more of it is sent. Idempotent."""
        for part in self.parts:
            if isinstance(part, Loan):
                part.release()


def choose_form(accept: str) -> Form:
    """The best form for an Accept header (RFC 9110 section 12.5.1). Raises NotAcceptable naming the forms there are."""
    best: tuple[float, int] | None = None
    chosen = None
    ranges = _parse_accept(accept or "*/*")
    for order, form in enumerate(FORMS):
        quality = _quality(form, ranges)
        if quality > 0 and (best is None or (quality, -order) > best):
            best, chosen = (quality, -order), form
    if chosen is None:
        raise NotAcceptable(f"none of the answer forms is acceptable to you; there are {', '.join(FORMS)}")
    return chosen


def default_dtype(form: Form, compute_dtype: Dtype) -> Dtype:
    """The answer's dtype where the request names none."""
    return "float32" if form in ("application/json", "application/x-npy") else compute_dtype


def check_form(form: Form, dtype: Dtype) -> None:
    """Raise InvalidRequest for a dtype that the form cannot hold."""
    if form == "application/x-npy" and dtype == "bfloat16":
        raise InvalidRequest("npy has no bfloat16; ask for float32 or float16, or for another form", param="dtype")


def check_size(
    form: Form,
    plans: Sequence[ImagePlan],
    *,
    spec: EncoderSpec,
    itemsize: int,
    pooled: bool,
    encoding: EncodingFormat,
    limit: int,
) -> None:
    """Refuse, before any work, an answer that its form cannot carry.

    Raises ResponseTooLarge (JSON over `limit` bytes) or TooManyImagesForForm (npy of several images; too much header).
    """
    rows = [1 if pooled else plan.grid.num_tokens for plan in plans]
    if form == "application/json":
        values = sum(rows) * spec.text_hidden_size
        expected = values * JSON_FLOAT_BYTES if encoding == "float" else values * itemsize * 4 // 3
        if expected > limit:
            raise ResponseTooLarge(
                f"the JSON answer would have about {expected} bytes, over the limit of {limit}; ask for a binary form",
                numbers={"bytes": expected, "limit": limit},
            )
    if form == "application/x-npy" and len(plans) > 1:
        raise TooManyImagesForForm("npy holds one image; send one a request, or ask for another form")
    if form in ("application/octet-stream", "application/x-npy"):
        bounds = [sum(rows[:index]) for index in range(len(rows) + 1)]
        length = len(_compact(geometry(plans, bounds, spec)))
        if form == "application/octet-stream":
            length += len(plans) * 160 + 300  # the metadata header, generously
        if length > MAX_HEADER_BYTES:
            raise TooManyImagesForForm(
                f"{len(plans)} images need {length} bytes of response headers, over the limit of {MAX_HEADER_BYTES}; "
                f"ask for application/vnd.safetensors",
                numbers={"bytes": length, "limit": MAX_HEADER_BYTES},
            )


def geometry(plans: Sequence[ImagePlan], bounds: Sequence[int], spec: EncoderSpec) -> list[dict[str, Any]]:
    """The `images` list; image i owns rows `bounds[i]` to `bounds[i + 1]`."""
    return [
        ImageGeometry(
            grid_thw=list(plan.grid),
            num_tokens=plan.grid.num_tokens,
            start=bounds[index],
            end=bounds[index + 1],
            original_size=list(plan.original_size),
            encoded_size=list(plan.encoded_size),
            padded_size=list(plan.padded_size),
            downscaled=plan.downscaled,
            patches=plan.patches,
            tier=plan.tier,
            prompt=prompt_text(spec, plan),
        ).model_dump()
        for index, plan in enumerate(plans)
    ]


def encode_embeddings(
    form: Form, embeddings: Embeddings, plans: Sequence[ImagePlan], context: AnswerContext, encoding: EncodingFormat
) -> Answer:
    """The answer of /v1/encode. Runs in a thread: JSON of a large result takes a while."""
    images = geometry(plans, embeddings.bounds, context.spec)
    match form:
        case "application/vnd.safetensors":
            return Answer(_safetensors(embeddings, plans, images, context), form, {})
        case "application/octet-stream":
            headers = {METADATA_HEADER: _vllm_metadata(embeddings, plans, context), GEOMETRY_HEADER: _compact(images)}
            return Answer([embeddings.data], form, headers)
        case "application/x-npy":
            header = io.BytesIO()
            np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(embeddings.values))
            return Answer([header.getvalue(), embeddings.data], form, {GEOMETRY_HEADER: _compact(images)})
        case "application/json":
            fields = {
                "id": context.request_id,
                "object": "tpvision.encoding",
                "created": int(time.time()),
                "model": context.model,
                "dtype": embeddings.dtype,
                "usage": _usage(plans),
            }
            return Answer(_in_pieces(_json(fields, "images", images, embeddings, encoding)), form, {})


def openai_embeddings(
    embeddings: Embeddings, plans: Sequence[ImagePlan], context: AnswerContext, encoding: EncodingFormat
) -> Answer:
    """The answer of /v1/embeddings (the OpenAI API reference's CreateEmbeddingResponse)."""
    fields = {
        "object": "list",
        "model": context.model,
        "usage": _usage(plans),
        "images": geometry(plans, embeddings.bounds, context.spec),
    }
    data = [{"object": "embedding", "index": index} for index in range(len(plans))]
    return Answer(_in_pieces(_json(fields, "data", data, embeddings, encoding)), "application/json", {})


def _json(
    fields: Mapping[str, Any],
    name: str,
    entries: Sequence[Mapping[str, Any]],
    embeddings: Embeddings,
    encoding: EncodingFormat,
) -> Iterator[bytes]:
    """The fields, and a list `name` of the entries, each with its embedding."""
    yield orjson.dumps(fields)[:-1] + f',"{name}":['.encode()
    for index, entry in enumerate(entries):
        has_shape = encoding == "base64" and not embeddings.is_pooled
        shape = {"shape": embeddings.shape_of(index)} if has_shape else {}
        yield b"," * (index > 0) + orjson.dumps({**entry, **shape})[:-1] + b',"embedding":'
        yield from _embedding(embeddings, index, encoding)
        yield b"}"
    yield b"]}"


def _embedding(embeddings: Embeddings, index: int, encoding: EncodingFormat) -> Iterator[bytes]:
    """Its JSON, a few rows at a time, as nobody else has the interpreter meanwhile; by threes, for base64's sake."""
    rows = embeddings.of_image(index)
    step = 3 * max(1, _PIECE_BYTES // (3 * JSON_FLOAT_BYTES * embeddings.hidden))
    parts = [rows[start : start + step] for start in range(0, len(rows), step)]
    if encoding == "base64":
        yield b'"'
        for part in parts:
            yield base64.b64encode(part.data)
        yield b'"'
    elif embeddings.is_pooled:
        yield _numbers(embeddings.as_float32(index)[0])
    else:
        for number, part in enumerate(parts):
            yield (b"," if number else b"[") + _numbers(to_float32(part, embeddings.dtype))[1:-1]
        yield b"]"


def _numbers(values: npt.NDArray[np.float32]) -> bytes:
    return orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY)


def _in_pieces(parts: Iterable[bytes]) -> list[bytes]:
    """Joined into pieces of `_PIECE_BYTES` or a little more: each one more wakes the client up once more."""
    pieces: list[bytes] = []
    held: list[bytes] = []
    for part in parts:
        held.append(part)
        if sum(map(len, held)) >= _PIECE_BYTES:
            pieces.append(b"".join(held))
            held.clear()
    return [*pieces, b"".join(held)]


def _safetensors(
    embeddings: Embeddings, plans: Sequence[ImagePlan], images: list[dict[str, Any]], context: AnswerContext
) -> list[Part]:
    # By hand, because numpy has no bfloat16: 8 bytes of header length, the JSON header, the tensors
    # (https://huggingface.co/docs/safetensors). The header is padded so that the data starts at a multiple of 8.
    grids = np.array([plan.grid for plan in plans], dtype="<i8")
    end = embeddings.values.nbytes
    header = _compact(
        {
            "__metadata__": {
                "model": context.model,
                "dtype": embeddings.dtype,
                "request_id": context.request_id,
                "images": _compact(images),
            },
            "embeddings": {
                "dtype": DTYPE_NAMES[embeddings.dtype],
                "shape": list(embeddings.values.shape),
                "data_offsets": [0, end],
            },
            "grid_thw": {"dtype": "I64", "shape": list(grids.shape), "data_offsets": [end, end + grids.nbytes]},
        }
    ).encode()
    header += b" " * (-len(header) % 8)
    return [struct.pack("<Q", len(header)) + header, embeddings.data, grids.tobytes()]


def _vllm_metadata(embeddings: Embeddings, plans: Sequence[ImagePlan], context: AnswerContext) -> str:
    row_bytes = embeddings.hidden * ITEMSIZE[embeddings.dtype]
    data = [
        {
            "index": index,
            "embed_dtype": embeddings.dtype,
            "endianness": "little",
            "start": embeddings.bounds[index] * row_bytes,
            "end": embeddings.bounds[index + 1] * row_bytes,
            "shape": list(embeddings.shape_of(index)),
        }
        for index in range(len(plans))
    ]
    return _compact(
        {
            "id": context.request_id,
            "created": int(time.time()),
            "model": context.model,
            "data": data,
            "usage": _usage(plans),
        }
    )


def _usage(plans: Sequence[ImagePlan]) -> dict[str, int]:
    num_tokens = sum(plan.grid.num_tokens for plan in plans)
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _parse_accept(accept: str) -> list[tuple[str, float]]:
    ranges = []
    for item in accept.split(","):
        name, *parameters = (part.strip().lower() for part in item.split(";"))
        quality = 1.0
        for parameter in parameters:
            key, _, value = parameter.partition("=")
            if key.strip() == "q":
                try:
                    quality = float(value)
                except ValueError:
                    quality = 0.0
        if name:
            ranges.append(("*/*" if name == "*" else name, quality))
    return ranges


def _quality(form: Form, ranges: Sequence[tuple[str, float]]) -> float:
    """The quality of the most specific range that matches; 0 if none does."""
    for wanted in (form, f"{form.partition('/')[0]}/*", "*/*"):
        for name, quality in ranges:
            if name == wanted:
                return quality
    return 0.0
