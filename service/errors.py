"""Every error a client can be answered with, as one tree, and the only place that knows status codes.

    ServiceError
    ├── InvalidRequest 400 ── TooManyImagesForForm
    ├── Unauthorized 401
    ├── NotFound 404 ── ModelNotFound
    ├── MethodNotAllowed 405, NotAcceptable 406, RequestTimeout 408, BodyTooLarge 413, UnsupportedImage 415,
    │   HeadersTooLarge 431
    ├── Unprocessable 422 ── UndecodableImage, ImageTooLarge, DecodeTimeout, TooManyPatches, TooManyImages,
    │                        TooManyFrames, RequestTooLarge, ResponseTooLarge, UrlFetchFailed, PushFailed
    ├── Overloaded 429
    ├── InternalError 500 ── NonFiniteOutput, EncodeFailed, StoreFailed
    ├── NotReady 503 ── WorkersLost
    └── DeadlineExceeded 504

Messages name the value found and the limit, never the client's bytes. `numbers` are the same values as fields.
"""

import json
from collections.abc import Mapping
from typing import Any, ClassVar

_NOT_READY_RETRY_S = 5.0  # about what a restart takes


class ServiceError(Exception):
    """Base of the tree. `param` names the field or image at fault, `retry_after_s` becomes the Retry-After header."""

    status: ClassVar[int]
    code: ClassVar[str]

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        numbers: Mapping[str, Any] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.numbers = dict(numbers or {})
        self.retry_after_s = retry_after_s
        self.beside: dict[str, Any] = {}  # what a route's answer has beside the error object

    @property
    def type(self) -> str:
        """The OpenAI error object's coarse class."""
        if self.status >= 500:
            return "server_error"
        return {401: "authentication_error", 429: "rate_limit_error"}.get(self.status, "invalid_request_error")

    def with_param(self, param: str) -> "ServiceError":
        """Itself, naming `param` unless it already names something finer."""
        self.param = self.param or param
        return self

    def as_dict(self) -> dict[str, Any]:
        """The OpenAI error object with the numbers beside its own fields."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": {**self.numbers, **error}}

    def as_json(self) -> bytes:
        """The body of the answer. A header may claim numbers of over 64 bits, which orjson does not write."""
        return json.dumps({**self.as_dict(), **self.beside}, separators=(",", ":")).encode()


class InvalidRequest(ServiceError):
    """The request is malformed, or names a field, option or override that is unknown or not allowed."""

    status, code = 400, "invalid_request"


class TooManyImagesForForm(InvalidRequest):
    """The chosen form cannot carry the geometry of so many images in its headers."""

    code = "too_many_images_for_form"


class Unauthorized(ServiceError):
    """Keys are configured and the request has none that is right."""

    status, code = 401, "unauthorized"


class NotFound(ServiceError):
    """No such route."""

    status, code = 404, "not_found"


class ModelNotFound(NotFound):
    """The request names another model than the one served."""

    code = "model_not_found"


class MethodNotAllowed(ServiceError):
    """The route exists, the method does not."""

    status, code = 405, "method_not_allowed"


class NotAcceptable(ServiceError):
    """No answer form matches the Accept header."""

    status, code = 406, "not_acceptable"


class RequestTimeout(ServiceError):
    """The headers or the body did not arrive in time."""

    status, code = 408, "request_timeout"


class BodyTooLarge(ServiceError):
    """The body is over the limit, whatever its Content-Length said."""

    status, code = 413, "body_too_large"


class UnsupportedImage(ServiceError):
    """The bytes are not an image of a format that we read."""

    status, code = 415, "unsupported_image"


class Unprocessable(ServiceError):
    """Base of what is well-formed and still cannot be answered; it has no code, because it is never the answer."""

    status = 422


class UndecodableImage(Unprocessable):
    """The image is broken."""

    code = "undecodable_image"


class ImageTooLarge(Unprocessable):
    """The decoded picture would have more pixels than allowed."""

    code = "image_too_large"


class DecodeTimeout(Unprocessable):
    """Decoding ran past its deadline and was ended."""

    code = "decode_timeout"


class TooManyPatches(Unprocessable):
    """More patches than the top capacity tier, under policy `refuse`."""

    code = "too_many_patches"


class TooManyImages(Unprocessable):
    """More images than one request may hold."""

    code = "too_many_images"


class TooManyFrames(Unprocessable):
    """More frames than a video chunk of this model may have."""

    code = "too_many_frames"


class RequestTooLarge(Unprocessable):
    """The images of one request need more rows than the slab has."""

    code = "request_too_large"


class ResponseTooLarge(Unprocessable):
    """The JSON answer would be over its cap; the binary forms have none."""

    code = "response_too_large"


class UrlFetchFailed(Unprocessable):
    """A URL may be fetched, but its server gave no image file in time."""

    code = "url_fetch_failed"


class PushFailed(Unprocessable):
    """The embeddings are there, but the receiver that the request names did not take them in time."""

    code = "push_failed"


class Overloaded(ServiceError):
    """The queue is full."""

    status, code = 429, "overloaded"


class HeadersTooLarge(ServiceError):
    """The request line and headers are over the limit, or there are too many of them."""

    status, code = 431, "headers_too_large"


class InternalError(ServiceError):
    """Our own fault."""

    status, code = 500, "internal_error"


class NonFiniteOutput(InternalError):
    """The embedding of this image holds NaN or infinity."""

    code = "non_finite_output"


class EncodeFailed(InternalError):
    """The image was in flight each time its worker group was lost."""

    code = "encode_failed"


class StoreFailed(InternalError):
    """The embeddings are there, but could not be written where they are to be stored."""

    code = "store_failed"


class NotReady(ServiceError):
    """Loading or draining."""

    status, code = 503, "not_ready"

    def __init__(self, message: str, *, retry_after_s: float | None = _NOT_READY_RETRY_S, **others: Any) -> None:
        super().__init__(message, retry_after_s=retry_after_s, **others)


class WorkersLost(NotReady):
    """The worker group was lost and did not come back in time."""

    code = "workers_lost"


class DeadlineExceeded(ServiceError):
    """The request's deadline passed before its embeddings were there."""

    status, code = 504, "deadline_exceeded"


def _subclasses(base: type[ServiceError]) -> list[type[ServiceError]]:
    return [base, *(found for child in base.__subclasses__() for found in _subclasses(child))]


BY_CODE: dict[str, type[ServiceError]] = {
    cls.code: cls for cls in _subclasses(ServiceError) if cls is not ServiceError and "code" in vars(cls)
}


def read_error(body: Any, *, retry_after_s: float | None = None) -> ServiceError | None:
    """What `as_dict` made `body` of, for those who receive it; None where it is no error object of this tree."""
    detail = body.get("error") if isinstance(body, dict) else None
    cls = BY_CODE.get(str(detail.get("code"))) if isinstance(detail, dict) else None
    if detail is None or cls is None:
        return None
    numbers = {key: value for key, value in detail.items() if key not in ("message", "type", "param", "code")}
    return cls(str(detail.get("message")), param=detail.get("param"), numbers=numbers, retry_after_s=retry_after_s)
