import asyncio
import os
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from service import body as module
from service.body import Body, FilePart, ImageBytes, receive_body, receive_multipart
from service.errors import BodyTooLarge, InvalidRequest, Overloaded, RequestTimeout, ServiceError, TooManyImages

BOUNDARY = "XyZ"
FORM = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}


class Client:
    """What an ASGI server would hand on of a client that sends these chunks, and then is silent or gone."""

    def __init__(
        self, chunks: Iterable[bytes], headers: dict[str, str] | None = None, *, end: str = "complete"
    ) -> None:
        self._messages: list[Message] = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
        if end == "complete":
            self._messages.append({"type": "http.request", "body": b"", "more_body": False})
        elif end == "gone":
            self._messages.append({"type": "http.disconnect"})
        pairs = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        self.request = Request({"type": "http", "method": "POST", "headers": pairs}, self._receive)
        self.num_read = 0

    async def _receive(self) -> Message:
        if not self._messages:
            await asyncio.Event().wait()
        self.num_read += 1
        return self._messages.pop(0)


def read(image: ImageBytes) -> bytes:
    return os.pread(image.fd, image.length, image.offset)


def receive(client: Client, *, max_bytes: int = 100, timeout_s: float = 5.0, **options: Any) -> bytes:
    async def run() -> bytes:
        with await receive_body(client.request, max_bytes=max_bytes, timeout_s=timeout_s, **options) as body:
            return read(body.image)

    return asyncio.run(run())


def form(*parts: tuple[str, bytes], end: bytes = b"--\r\n") -> bytes:
    delimiter = f"--{BOUNDARY}".encode()
    pieces = [delimiter + b"\r\n" + header.encode() + b"\r\n\r\n" + data + b"\r\n" for header, data in parts]
    return b"".join(pieces) + delimiter + end


def file(data: bytes, name: str = "file") -> tuple[str, bytes]:
    return f'Content-Disposition: form-data; name="{name}"; filename="a.png"\r\nContent-Type: image/png', data


def receive_form(
    data: bytes, headers: dict[str, str] = FORM, *, chunk_bytes: int = 7, max_images: int = 4, max_bytes: int = 10**6
) -> tuple[list[bytes], list[str]]:
    chunks = [data[start : start + chunk_bytes] for start in range(0, len(data), chunk_bytes)]
    client = Client(chunks, headers)

    async def run() -> tuple[list[bytes], list[str]]:
        body, parts = await receive_multipart(client.request, max_bytes=max_bytes, max_images=max_images, timeout_s=5.0)
        with body:
            return [read(part.image) for part in parts], [part.field for part in parts]

    return asyncio.run(run())


def open_bodies() -> int:
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the folder's own descriptor
            links.append(str(entry.readlink()))
    return sum("tpvision-body" in link for link in links)


@pytest.fixture(autouse=True)
def _no_body_stays_open() -> Iterator[None]:
    assert open_bodies() == 0
    yield
    assert open_bodies() == 0


def test_chunks_arrive_in_order() -> None:
    assert receive(Client([b"ab", b"", b"c" * 50])) == b"ab" + b"c" * 50


def test_body_of_exactly_the_limit_is_taken() -> None:
    assert len(receive(Client([b"x" * 100]))) == 100


def test_streamed_bytes_count_whatever_content_length_says() -> None:
    with pytest.raises(BodyTooLarge) as caught:
        receive(Client([b"x" * 60, b"x" * 60], {"content-length": "5"}))
    assert caught.value.numbers == {"limit_bytes": 100}


@pytest.mark.parametrize(("num_chunks", "num_read"), [(8, 9), (1000, 11)])  # one chunk too many to notice the bound
def test_refused_body_is_discarded_up_to_a_bound(num_chunks: int, num_read: int) -> None:
    client = Client([b"x" * 40] * num_chunks)
    with pytest.raises(BodyTooLarge):
        receive(client)
    assert client.num_read == num_read


def test_declared_length_over_the_limit_is_discarded_from_the_start() -> None:
    kept: list[int] = []
    client = Client([b"x"] * 200, {"content-length": "200"})
    with pytest.raises(BodyTooLarge):
        receive(client, on_bytes=kept.append)
    assert kept == [] and client.num_read == 201


def test_client_that_waits_for_100_continue_is_refused_unread() -> None:
    client = Client([], {"content-length": "200", "expect": "100-continue"}, end="silent")
    with pytest.raises(BodyTooLarge):
        receive(client)
    assert client.num_read == 0


def test_discarding_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DISCARD_S", 0.05)
    with pytest.raises(BodyTooLarge):
        receive(Client([b"x" * 101], end="silent"))


def test_slow_body_times_out() -> None:
    with pytest.raises(RequestTimeout):
        receive(Client([b"x"], end="silent"), timeout_s=0.05)


def test_client_that_leaves() -> None:
    with pytest.raises(ClientDisconnect):
        receive(Client([b"x"], end="gone"))


def test_on_bytes_may_refuse() -> None:
    seen: list[int] = []

    def on_bytes(num_bytes: int) -> None:
        seen.append(num_bytes)
        if sum(seen) > 3:
            raise Overloaded("full")

    client = Client([b"ab", b"cd", b"ef"])
    with pytest.raises(Overloaded):
        receive(client, on_bytes=on_bytes)
    assert seen == [2, 2] and client.num_read == 4


@pytest.mark.parametrize("chunk_bytes", [1, 7, 64, 10**6])
def test_form_files_in_order(chunk_bytes: int) -> None:
    files = [b"\r\n--XyY\r\n" * 20, b"b", random.Random(0).randbytes(5000)]
    data = form(*(file(data, f"f{index}") for index, data in enumerate(files)))
    assert receive_form(data, chunk_bytes=chunk_bytes) == (files, ["f0", "f1", "f2"])


def test_a_name_that_is_not_ascii_in_its_older_spelling_makes_a_file() -> None:
    part = ("Content-Disposition: form-data; name=\"f\"; FileName*=UTF-8''%C3%A9t%C3%A9.png", b"abc")
    assert receive_form(form(part)) == ([b"abc"], ["f"])


def test_form_ranges_lie_in_one_body() -> None:
    async def run() -> None:
        client = Client([form(file(b"abc"), file(b"de"))], FORM)
        body, parts = await receive_multipart(client.request, max_bytes=999, max_images=2, timeout_s=5.0)
        with body:
            assert parts == (
                FilePart("file", ImageBytes(body.fd, 0, 3)),
                FilePart("file", ImageBytes(body.fd, 3, 2)),
            )
            assert body.num_bytes == 5

    asyncio.run(run())


@pytest.mark.parametrize(
    ("data", "headers", "message"),
    [
        (form(file(b"x")), {"content-type": "multipart/form-data"}, "boundary"),
        (form(file(b"x")), {"content-type": "multipart/form-data; boundary=" + "x" * 999}, "boundary"),
        (form(file(b"x")), {"content-type": "multipart/form-data; boundary=other"}, "malformed"),
        (b"not a form at all", FORM, "malformed"),
        (form(file(b"x"), end=b""), FORM, "closing boundary"),
        (b"", FORM, "closing boundary"),
        (form(), FORM, "no file part"),
        (form(file(b"")), FORM, "without a single byte"),
        (form(("X: " + "y" * 10_000, b"x")), FORM, "malformed"),
        (form(("\r\n".join(f"X{i}: y" for i in range(20)), b"x")), FORM, "malformed"),
        (form(("Content-Type: image/png", b"x")), FORM, "text field"),
        (form(('Content-Disposition: form-data; name="filename*=x"', b"x")), FORM, "text field"),
        (form(('Content-Disposition: form-data; name="a"; note="\\"; filename*=x"', b"x")), FORM, "text field"),
    ],
)
def test_malformed_forms(data: bytes, headers: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        receive_form(data, headers)


def test_large_text_field_is_refused_and_read_to_its_end() -> None:
    data = form(('Content-Disposition: form-data; name="image"', b"QUJD" * 500_000))
    client = Client([data[start : start + 2**16] for start in range(0, len(data), 2**16)], FORM)
    with pytest.raises(InvalidRequest, match="text field") as caught:
        asyncio.run(receive_multipart(client.request, max_bytes=2**22, max_images=1, timeout_s=5.0))
    assert caught.value.param == "image"
    assert client.num_read == -(-len(data) // 2**16) + 1


def test_too_many_files() -> None:
    with pytest.raises(TooManyImages):
        receive_form(form(*[file(b"x")] * 5))


def test_form_over_the_limit() -> None:
    with pytest.raises(BodyTooLarge):
        receive_form(form(file(b"x" * 500)), max_bytes=400)


def test_closing_a_body_twice_is_harmless() -> None:
    body = Body()
    body.close()
    body.close()


async def _app(scope: Scope, receive: Receive, send: Send) -> None:
    request = Request(scope, receive)
    try:
        with await receive_body(request, max_bytes=2**20, timeout_s=5.0) as body:
            response = JSONResponse(body.num_bytes)
    except ServiceError as error:
        response = JSONResponse(error.as_dict(), error.status)
    await response(scope, receive, send)


async def _serve(use: Callable[[str], Awaitable[None]]) -> None:
    server = uvicorn.Server(uvicorn.Config(_app, log_level="critical", lifespan="off", ws="none"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await use(f"http://127.0.0.1:{listener.getsockname()[1]}")
        finally:
            server.should_exit = True
            await serving


async def _chunks(num_bytes: int) -> AsyncIterator[bytes]:
    for _ in range(num_bytes // 2**16):
        yield bytes(2**16)


def test_real_client_sees_413_after_sending_too_much() -> None:
    async def use(url: str) -> None:
        async with httpx.AsyncClient(timeout=20) as client:
            for content in (bytes(3 * 2**20), _chunks(3 * 2**20)):
                answer = await client.post(url, content=content)
                assert answer.status_code == 413
            answer = await client.post(url, content=b"x" * 1000)
            assert answer.json() == 1000

    asyncio.run(_serve(use))
