"""JSON request bodies: what they may hold, and how their images become bytes. Pure.

The `unpack_` functions run in a decode process (`service.decode_process`), because a body may be 64 MiB of base64; the
models here also describe the bodies in the OpenAPI document. Bytes are not looked at: whether they are an image is
`service.image`'s question. A URL is given back as it is, where the operator lets us fetch any (`service.fetch`). No
message repeats what the client sent.
"""

import binascii
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, ValidationError, model_validator

from service.errors import InvalidRequest, TooManyFrames, TooManyImages

# JSON values a body may hold, counted by its separators. The parser makes an object of each, 50 to 250 bytes, so that
# 64 MiB of `[],[],…` would become gigabytes. An honest request has a handful for each image.
MAX_JSON_VALUES = 200_000
MAX_MODEL_CHARS = 256  # also keeps the decode process's reply small
MAX_URL_CHARS = 2048
MAX_PARTS = 1024
_SHOWN_CHARS = 64  # of an unknown field's name

# One grey pixel, so that "Try it out" in /docs answers with an embedding.
EXAMPLE_IMAGE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR42mNoAAAAggCB2kUIOwAAAABJRU5ErkJggg=="
)

_NOT_BASE64 = "not base64, and only images are taken"
_SCHEME = re.compile(r"\s*([A-Za-z][A-Za-z0-9+.-]*):")
_URLSAFE = str.maketrans("-_", "+/")

_Body = TypeVar("_Body", bound=BaseModel)

EncodingFormat = Literal["float", "base64"]
Pooling = Literal["mean", "none"]
Route = Literal["encode", "embeddings", "sglang"]
Source = bytes | str  # an image file, or the http(s) URL where it lies
Frames = tuple[Source, ...]  # of a video chunk


# What a body calls its list of images, and so error.param.
LIST_NAMES: dict[Route, str] = {"encode": "images", "embeddings": "input", "sglang": "mm_items"}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


ImageText = Annotated[
    str,
    Field(
        description="The image file as base64 (standard or URL-safe, padding optional), as a data URI with ;base64 or, "
        "where the operator allows it, as an http(s) URL.",
        examples=[EXAMPLE_IMAGE],
    ),
]


class ImageUrl(_Strict):
    """OpenAI's wrapper around a URL."""

    url: ImageText


def _url_tag(value: Any) -> str:
    return "<ImageUrl>" if isinstance(value, dict) else "<str>"


def _item_tag(value: Any) -> str | None:
    if isinstance(value, str):
        return "<str>"
    if not isinstance(value, dict):
        return None
    if "type" not in value:
        return "<ImageItem>" if "image" in value else None
    return {"image": "<DataItem>", "image_url": "<UrlItem>"}.get(str(value["type"]))


def _media_tag(value: Any) -> str | None:
    return "<VideoItem>" if _is_video_chunk(value) else _item_tag(value)


def _sglang_tag(value: Any) -> str:
    return "<SGLangItem>" if isinstance(value, dict) else "<str>"


def _is_video_chunk(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") == "video_chunk"


# A tag becomes a part of pydantic's error locations; the brackets let `_param` leave it out.
_TAGS = ("<str>", "<ImageUrl>", "<DataItem>", "<UrlItem>", "<ImageItem>", "<VideoItem>", "<SGLangItem>")
Url = Annotated[
    Annotated[ImageText, Tag("<str>")] | Annotated[ImageUrl, Tag("<ImageUrl>")],
    Discriminator(_url_tag),
]


class DataItem(_Strict):
    """An image as `{"type": "image", "data": …}`."""

    type: Literal["image"]
    data: ImageText

    @property
    def text(self) -> str:
        """Its base64 or data URI."""
        return self.data


class UrlItem(_Strict):
    """An image as `{"type": "image_url", "url": …}`, or OpenAI's `image_url` in place of `url`."""

    type: Literal["image_url"]
    url: Url | None = None
    image_url: Url | None = None

    @model_validator(mode="after")
    def _check_one(self) -> "UrlItem":
        if (self.url is None) == (self.image_url is None):
            raise ValueError("exactly one of url and image_url is needed")
        return self

    @property
    def text(self) -> str:
        """Its base64 or data URI."""
        url = self.url or self.image_url or ""
        return url if isinstance(url, str) else url.url


class ImageItem(_Strict):
    """An image as `{"image": …}`, the shape that Jina's clients send."""

    image: ImageText

    @property
    def text(self) -> str:
        """Its base64 or data URI."""
        return self.image


Item = Annotated[
    Annotated[ImageText, Tag("<str>")]
    | Annotated[DataItem, Tag("<DataItem>")]
    | Annotated[UrlItem, Tag("<UrlItem>")]
    | Annotated[ImageItem, Tag("<ImageItem>")],
    Discriminator(_item_tag),
]


class VideoItem(_Strict):
    """Frames that are encoded together, as one item with one run of tokens; only some models take them."""

    type: Literal["video_chunk"]
    frames: list[Item] = Field(
        min_length=1, description="Images of one size, in order; at most as many as the model takes."
    )


MediaItem = Annotated[
    Annotated[ImageText, Tag("<str>")]
    | Annotated[DataItem, Tag("<DataItem>")]
    | Annotated[UrlItem, Tag("<UrlItem>")]
    | Annotated[ImageItem, Tag("<ImageItem>")]
    | Annotated[VideoItem, Tag("<VideoItem>")],
    Discriminator(_media_tag),
]


class EncodeBody(_Strict):
    """JSON body of POST /v1/encode. Options are in the query."""

    images: list[MediaItem] = Field(
        min_length=1, description="Images and video chunks, answered in this order, all or none."
    )


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


class EmbeddingsBody(_Strict):
    """JSON body of POST /v1/embeddings, in OpenAI's shape, with what Jina's and Infinity's clients add to it."""

    input: Annotated[list[Item], BeforeValidator(_as_list, json_schema_input_type=Item | list[Item])] = Field(
        min_length=1, description="One image or a list of images, answered in this order, all or none."
    )
    model: str | None = Field(None, max_length=MAX_MODEL_CHARS, description="The served model's id, or nothing.")
    encoding_format: EncodingFormat | None = Field(
        None, description="float (default): lists of numbers. base64: little-endian float32."
    )
    dimensions: int | None = Field(None, ge=1, description="Only the model's own width is accepted.")
    pooling: Pooling = Field("mean", description="mean: one vector an image. none: its matrix of merged tokens.")
    user: str | None = Field(None, description="Ignored.")
    modality: Literal["image"] = Field("image", description="Infinity's: what the input is.")
    embedding_type: EncodingFormat | None = Field(None, description="Jina's name for encoding_format.")
    normalized: bool | None = Field(None, description="Jina's name for the option normalize.")
    task: str | None = Field(None, description="Jina's: ignored, because the tower has one embedding for all tasks.")


class SGLangItem(BaseModel):
    """An image as SGLang passes it on, with options that other encoders may have; they are ignored."""

    model_config = ConfigDict(frozen=True, strict=True)

    url: ImageText

    @property
    def text(self) -> str:
        """Its base64 or data URI."""
        return self.url


ImageLike = str | DataItem | UrlItem | ImageItem | SGLangItem


class SGLangBody(BaseModel):
    """JSON body of POST /encode: what an SGLang server without an encoder sends. Other fields of its are ignored."""

    model_config = ConfigDict(frozen=True, strict=True)

    mm_items: list[
        Annotated[
            Annotated[ImageText, Tag("<str>")] | Annotated[SGLangItem, Tag("<SGLangItem>")], Discriminator(_sglang_tag)
        ]
    ] = Field(min_length=1, description="The images of this part, in order.")
    req_id: str = Field(min_length=1, max_length=256, description="Named in the message, for the receiver.")
    num_parts: int = Field(ge=1, le=MAX_PARTS, description="Parts of SGLang's request, each sent to an encoder.")
    part_idx: int = Field(ge=0, description="Which of them this is.")
    prefill_host: str = Field(max_length=256, description="The receiver; one that the operator allows.")
    embedding_port: int | None = Field(
        None,
        ge=1024,
        le=65535,
        description="Where it listens. SGLang names none under its transfer backend zmq_to_scheduler.",
    )
    modality: str = Field("IMAGE", max_length=16, description="IMAGE; others are refused.")


@dataclass(frozen=True, slots=True)
class SGLangOptions:
    """What an SGLang server asks for beside its images: which part this is, and who is to have its embeddings."""

    req_id: str
    num_parts: int
    part_idx: int
    prefill_host: str
    embedding_port: int


@dataclass(frozen=True, slots=True)
class EmbeddingsOptions:
    """What an embeddings request asks for beside its images; None where it says nothing."""

    model: str | None
    encoding_format: EncodingFormat
    dimensions: int | None
    pooling: Pooling
    normalized: bool


def unpack_encode(
    body: bytes, *, max_images: int, max_frames: int = 1, allow_urls: bool = False
) -> list[Source | Frames]:
    """The images and video chunks of a /v1/encode body, in order. `max_frames` 1: the model takes no chunks.

    Raises InvalidRequest, or TooManyImages or TooManyFrames before any is decoded; `param` names the image or field.
    """
    request = _validate(EncodeBody, body, key="images", max_images=max_images)
    for index, item in enumerate(request.images):
        if isinstance(item, VideoItem):
            _check_frames(len(item.frames), max_frames, param=f"images[{index}]")
    return [
        tuple(_decode_items(item.frames, key=f"images[{index}].frames", allow_urls=allow_urls))
        if isinstance(item, VideoItem)
        else _decode_item(item, param=f"images[{index}]", allow_urls=allow_urls)
        for index, item in enumerate(request.images)
    ]


def unpack_embeddings(
    body: bytes, *, max_images: int, allow_urls: bool = False
) -> tuple[list[Source], EmbeddingsOptions]:
    """The images and options of a /v1/embeddings body. Raises like `unpack_encode`."""
    request = _validate(EmbeddingsBody, body, key="input", max_images=max_images)
    asked = {name for name in (request.encoding_format, request.embedding_type) if name is not None}
    if len(asked) > 1:
        raise InvalidRequest("encoding_format and embedding_type differ; send one of them", param="embedding_type")
    options = EmbeddingsOptions(
        model=request.model,
        encoding_format=next(iter(asked), "float"),
        dimensions=request.dimensions,
        pooling=request.pooling,
        normalized=bool(request.normalized),
    )
    return _decode_items(request.input, key="input", allow_urls=allow_urls), options


def unpack_sglang(body: bytes, *, max_images: int, allow_urls: bool = False) -> tuple[list[Source], SGLangOptions]:
    """The images and options of a /encode body. Raises like `unpack_encode`."""
    key = LIST_NAMES["sglang"]
    request = _validate(SGLangBody, body, key=key, max_images=max_images)
    if request.modality.upper() != "IMAGE":
        raise InvalidRequest("images are all that is encoded here", param="modality")
    if request.part_idx >= request.num_parts:
        raise InvalidRequest("part_idx must be less than num_parts", param="part_idx")
    if request.embedding_port is None:
        raise InvalidRequest(
            "a port to push to is needed: start SGLang with --encoder-transfer-backend zmq_to_tokenizer",
            param="embedding_port",
        )
    options = SGLangOptions(
        request.req_id, request.num_parts, request.part_idx, request.prefill_host, request.embedding_port
    )
    return _decode_items(request.mm_items, key=key, allow_urls=allow_urls), options


def decode_base64(text: str) -> bytes:
    """Bytes of a data URI or of plain base64. Raises InvalidRequest on anything else, and when there are none."""
    scheme = _SCHEME.match(text)
    if scheme is not None:
        if scheme[1].lower() != "data":
            raise InvalidRequest("URL fetching is off: send the image itself, as base64 or as a data URI")
        text = _data_uri_payload(text)
    if not text.isascii():
        raise InvalidRequest(f"{_NOT_BASE64}: there are characters outside its alphabet")
    text = "".join(text.split()).translate(_URLSAFE)
    digits = text.rstrip("=")
    if len(digits) % 4 == 1 or len(text) - len(digits) > 2:
        raise InvalidRequest(f"{_NOT_BASE64}: {len(digits)} digits with {len(text) - len(digits)} of padding cannot be")
    try:
        data = binascii.a2b_base64(digits + "=" * (-len(digits) % 4), strict_mode=True)
    except binascii.Error:
        raise InvalidRequest(f"{_NOT_BASE64}: there are characters outside its alphabet") from None
    if not data:
        raise InvalidRequest("an image without a single byte")
    return data


def _data_uri_payload(uri: str) -> str:
    head, comma, payload = uri.partition(",")
    if not comma:
        raise InvalidRequest("a data URI needs a comma before its data")
    if "base64" not in (parameter.strip().lower() for parameter in head.split(";")[1:]):
        raise InvalidRequest("a data URI needs ;base64 before its comma")
    return payload


def _check_frames(num_frames: int, limit: int, *, param: str) -> None:
    if limit == 1:
        raise InvalidRequest("this model takes images only, no video chunks", param=param)
    if num_frames > limit:
        raise TooManyFrames(
            f"{num_frames} frames in one video chunk; the model takes at most {limit}",
            param=param,
            numbers={"num_frames": num_frames, "limit": limit},
        )


def _decode_items(items: Iterable[ImageLike], *, key: str, allow_urls: bool) -> list[Source]:
    return [_decode_item(item, param=f"{key}[{index}]", allow_urls=allow_urls) for index, item in enumerate(items)]


def _decode_item(item: ImageLike, *, param: str, allow_urls: bool) -> Source:
    try:
        return _read_source(item if isinstance(item, str) else item.text, allow_urls=allow_urls)
    except InvalidRequest as error:
        raise error.with_param(param) from None


def _read_source(text: str, *, allow_urls: bool) -> Source:
    scheme = _SCHEME.match(text) if allow_urls else None
    if scheme is None or scheme[1].lower() == "data":
        return decode_base64(text)
    if scheme[1].lower() not in ("http", "https"):
        raise InvalidRequest("the URL's scheme is none that is read: send a data URI or an http(s) URL")
    url = text.strip()
    if len(url) > MAX_URL_CHARS:
        raise InvalidRequest(f"the URL has more than {MAX_URL_CHARS} characters")
    return url


def _validate(model: type[_Body], body: bytes, *, key: str, max_images: int) -> _Body:
    tree = _parse(body)
    num_images = _count_images(tree.get(key))
    if num_images > max_images:
        raise TooManyImages(
            f"{num_images} images in one request; the limit is {max_images}",
            param=key,
            numbers={"num_images": num_images, "limit": max_images},
        )
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        raise _explain(error) from None


def _count_images(value: Any) -> int:
    """Of a tree that may be anything: items, with each frame of a video chunk counting as one."""
    if not isinstance(value, list):
        return 0
    chunks = [item.get("frames") for item in value if _is_video_chunk(item)]
    return len(value) + sum(len(frames) - 1 for frames in chunks if isinstance(frames, list) and frames)


def _parse(body: bytes) -> dict[str, Any]:
    if sum(body.count(separator) for separator in (b",", b":", b"[", b"{")) > MAX_JSON_VALUES:
        raise InvalidRequest(f"the JSON body holds more than {MAX_JSON_VALUES} values")
    try:
        tree = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON, from character {error.pos} on") from None
    if not isinstance(tree, dict):
        raise InvalidRequest("the JSON body must be an object")
    return tree


def _explain(error: ValidationError) -> InvalidRequest:
    first = error.errors(include_url=False, include_context=False)[0]
    if first["type"] == "too_short" and first["loc"][-1] == "frames":
        return InvalidRequest("at least one frame is needed", param=_param(first["loc"]))
    return InvalidRequest(_message(first["type"], first["msg"], first["input"]), param=_param(first["loc"]))


_MESSAGES: dict[str, str] = {
    "extra_forbidden": "unknown field",
    "missing": "this field is required",
    "too_short": "at least one image is needed",
    "union_tag_not_found": "not an image: send base64, a data URI, or an object of type image or image_url",
}


def _message(kind: str, message: str, value: Any) -> str:
    if kind == "union_tag_not_found" and isinstance(value, dict) and value.get("type") == "video_chunk":
        return "video chunks are taken by POST /v1/encode, as items of its images"
    return _MESSAGES.get(kind, message.removeprefix("Value error, "))


def _param(location: tuple[int | str, ...]) -> str:
    """`images[3].foo` of pydantic's ("images", 3, "<DataItem>", "foo")."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in _TAGS:
            path += f".{part[:_SHOWN_CHARS]}" if path else part[:_SHOWN_CHARS]
    return path
