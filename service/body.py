"""A request body, received into a memory file that decode processes can read.

The event loop only copies chunks as they come, at most a few hundred kilobytes each. Bytes are counted as received,
whatever Content-Length says. A body that is refused on the way is still read for a while and thrown away, because most
clients look for the answer only after they have sent everything. `service.routes` calls this; nothing is decoded here.
"""

import asyncio
import os
import re
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, aclosing, suppress
from dataclasses import dataclass
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from service.errors import BodyTooLarge, InvalidRequest, RequestTimeout, ServiceError, TooManyImages

# A refused body is read to this many times its limit and for this many seconds, whichever comes first.
DISCARD_FACTOR = 4
DISCARD_S = 10.0

_MAX_PART_HEADERS = 8
_MAX_PART_HEADER_BYTES = 4096
_SHOWN_CHARS = 64  # of a field's name
_QUOTED = re.compile(rb'"(?:[^"\\]|\\.)*"')
_ENCODED_FILENAME = re.compile(rb";\s*filename\*(?:0\*?)?\s*=", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ImageBytes:
    """Where one image file lies: a range, in bytes, of a memory file that its `Body` owns."""

    fd: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class VideoChunk:
    """Frames that are encoded together, each an image file, in order."""

    frames: tuple[ImageBytes, ...]


Item = ImageBytes | VideoChunk  # what becomes one run of merged tokens


@dataclass(frozen=True, slots=True)
class FilePart:
    """One file of a multipart form, and the name of its field."""

    field: str
    image: ImageBytes


class Body:
    """Bytes in a memory file. Its creator closes it, with `close` or as a context manager."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("tpvision-body", os.MFD_CLOEXEC)
        self.num_bytes = 0

    def write(self, chunk: bytes) -> None:
        """Append a chunk of at most 2 GiB; a memory file takes it whole. Raises OSError when memory is short."""
        self.num_bytes += os.write(self.fd, chunk)

    @property
    def image(self) -> ImageBytes:
        """All of it, as one image."""
        return ImageBytes(self.fd, 0, self.num_bytes)

    def close(self) -> None:
        """Let go of the memory; a decode process that still reads it holds a descriptor of its own. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> "Body":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def receive_body(
    request: Request, *, max_bytes: int, timeout_s: float, on_bytes: Callable[[int], None] = lambda num_bytes: None
) -> Body:
    """The body as sent, whatever it holds. The caller closes it.

    `on_bytes` hears of each chunk's size before it is kept, and may refuse it with a ServiceError. Raises that,
    BodyTooLarge, RequestTimeout, or starlette's ClientDisconnect; nothing is kept then.
    """
    with ExitStack() as undo:
        body = undo.enter_context(Body())
        await _receive(request, body.write, on_bytes, max_bytes=max_bytes, timeout_s=timeout_s)
        undo.pop_all()
        return body


async def receive_multipart(
    request: Request,
    *,
    max_bytes: int,
    max_images: int,
    timeout_s: float,
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
) -> tuple[Body, tuple[FilePart, ...]]:
    """The files of a multipart form, in order, one after the other in one body. The caller closes it.

    Raises InvalidRequest (no boundary, malformed, a text field, an empty file, no file), TooManyImages, and what
    `receive_body` raises.
    """
    with ExitStack() as undo:
        body = undo.enter_context(Body())
        form = _Form(request.headers.get("content-type"), body, max_images=max_images)
        await _receive(request, form.feed, on_bytes, max_bytes=max_bytes, timeout_s=timeout_s)
        parts = form.finish()
        undo.pop_all()
        return body, parts


async def _receive(
    request: Request,
    keep: Callable[[bytes], None],
    on_bytes: Callable[[int], None],
    *,
    max_bytes: int,
    timeout_s: float,
) -> None:
    """Pass every chunk to `keep`; after any refusal discard for a while before raising it."""
    _refuse_unsent(request, max_bytes)
    async with aclosing(request.stream()) as stream:
        try:
            async with asyncio.timeout(timeout_s):
                _refuse_encoded(request)
                _check_length(_declared_bytes(request), max_bytes)
                await _keep(stream, keep, on_bytes, max_bytes)
        except TimeoutError:
            raise RequestTimeout(
                f"the body was not complete after {timeout_s:g} s", numbers={"limit_s": timeout_s}
            ) from None
        except ServiceError:
            await _discard(stream, (DISCARD_FACTOR - 1) * max_bytes)
            raise


async def _keep(
    stream: AsyncIterator[bytes], keep: Callable[[bytes], None], on_bytes: Callable[[int], None], max_bytes: int
) -> None:
    num_bytes = 0
    async for chunk in stream:
        num_bytes += len(chunk)
        _check_length(num_bytes, max_bytes)
        on_bytes(len(chunk))
        keep(chunk)


async def _discard(stream: AsyncIterator[bytes], num_bytes: int) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_S):
            async for chunk in stream:
                num_bytes -= len(chunk)
                if num_bytes < 0:
                    return


def _has_encoded_filename(disposition: bytes) -> bool:
    """`filename*=` alone, as RFC 5987 and clients before RFC 7578 have it; python-multipart leaves that out."""
    return _ENCODED_FILENAME.search(_QUOTED.sub(b'""', disposition)) is not None


def _refuse_unsent(request: Request, max_bytes: int) -> None:
    """A client that waits for `100 Continue` has sent nothing yet and reads our answer at once."""
    if request.headers.get("expect", "").lower() == "100-continue":
        _check_length(_declared_bytes(request), max_bytes)


def _refuse_encoded(request: Request) -> None:
    """A kilobyte of gzip may hold a gigabyte; images are compressed as they are."""
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise InvalidRequest("an encoded body: send it without Content-Encoding")


def _declared_bytes(request: Request) -> int:
    length = request.headers.get("content-length", "")
    return int(length) if length.isdecimal() and len(length) < 20 else 0


def _check_length(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise BodyTooLarge(f"the body has more than {max_bytes} bytes", numbers={"limit_bytes": max_bytes})


class _Form:
    """A multipart form on its way into a body: python_multipart's callbacks, turned into a list of file ranges."""

    def __init__(self, content_type: str | None, body: Body, *, max_images: int) -> None:
        self._content_type = content_type
        self._body = body
        self._max_images = max_images
        self._parser: MultipartParser | None = None
        self._is_complete = False
        self._disposition = b""
        self._header_name = b""
        self._starts: list[tuple[str, int]] = []  # field name, offset in the body

    def feed(self, chunk: bytes) -> None:
        """Parse one more chunk. Raises InvalidRequest or TooManyImages; no more may be fed then."""
        if self._parser is None:
            self._parser = self._new_parser()
        try:
            self._parser.write(chunk)
        except FormParserError:
            raise InvalidRequest("the multipart body is malformed") from None

    def finish(self) -> tuple[FilePart, ...]:
        """The files, after the last chunk. Raises InvalidRequest when it was not the end, or a file has no bytes."""
        if not self._is_complete:
            raise InvalidRequest("the multipart body ends before its closing boundary")
        if not self._starts:
            raise InvalidRequest("the multipart body has no file part")
        ends = [offset for _, offset in self._starts[1:]] + [self._body.num_bytes]
        parts = []
        for index, ((field, start), end) in enumerate(zip(self._starts, ends, strict=True)):
            if start == end:
                raise InvalidRequest("a file part without a single byte", param=f"images[{index}]")
            parts.append(FilePart(field, ImageBytes(self._body.fd, start, end - start)))
        return tuple(parts)

    def _new_parser(self) -> MultipartParser:
        boundary = parse_options_header(self._content_type)[1].get(b"boundary", b"")
        if not boundary:
            raise InvalidRequest("a multipart body needs a boundary in its Content-Type")
        callbacks: Any = {
            "on_part_begin": self._on_part_begin,
            "on_header_field": self._on_header_name,
            "on_header_value": self._on_header_value,
            "on_header_end": self._on_header_end,
            "on_headers_finished": self._on_headers_finished,
            "on_part_data": self._on_data,
            "on_end": self._on_end,
        }
        try:
            return MultipartParser(
                boundary, callbacks, max_header_count=_MAX_PART_HEADERS, max_header_size=_MAX_PART_HEADER_BYTES
            )
        except FormParserError:
            raise InvalidRequest("the multipart boundary is too long") from None

    def _on_part_begin(self) -> None:
        self._disposition = b""

    def _on_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition += data[start:end]

    def _on_header_end(self) -> None:
        self._header_name = b""

    def _on_headers_finished(self) -> None:
        options = parse_options_header(self._disposition)[1]
        field = options.get(b"name", b"").decode(errors="replace")[:_SHOWN_CHARS]
        if b"filename" not in options and not _has_encoded_filename(self._disposition):
            raise InvalidRequest("a text field: images are file parts, and options are in the query", param=field)
        if len(self._starts) == self._max_images:
            raise TooManyImages(
                f"more than {self._max_images} images in one request",
                param=field,
                numbers={"limit": self._max_images},
            )
        self._starts.append((field, self._body.num_bytes))

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        self._body.write(data[start:end])

    def _on_end(self) -> None:
        self._is_complete = True
