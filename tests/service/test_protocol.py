"""Each bound of a connection, on real sockets against uvicorn and uvloop, with limits of a fraction of a second."""

import asyncio
import json
import logging
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import uvicorn
import uvloop
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from service.errors import ServiceError
from service.protocol import BoundedProtocol, ConnectionTable
from service.record import RequestRecord
from tp.settings import LimitSettings

QUICK = {"header_timeout_s": 0.3, "keep_alive_timeout_s": 0.3, "send_timeout_s": 0.3}
PATIENT = {"header_timeout_s": 20, "keep_alive_timeout_s": 20, "send_timeout_s": 20}
BIG_BYTES = 24 * 2**20
ID = "0123456789abcdef" * 2


@dataclass
class Service:
    """A small application behind our protocol; it notes what it saw."""

    port: int = 0
    events: list[str] = field(default_factory=list)
    release: asyncio.Event = field(default_factory=asyncio.Event)
    clients: list["Client"] = field(default_factory=list)
    records: list[RequestRecord] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    limits: LimitSettings | None = None  # reloaded ones
    tables: list[ConnectionTable] = field(default_factory=list)

    def note_refused(self, error: ServiceError) -> str:
        self.refused.append(error.code)
        return ID

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        record = scope["state"]["record"] = RequestRecord(ID, started=scope["state"]["started"])
        self.records.append(record)
        match scope["path"]:
            case "/big":
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await send({"type": "http.response.body", "body": bytes(BIG_BYTES), "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                self.events.append("big sent")
                return
            case "/wait":
                await self.release.wait()
                text = "waited"
            case "/body":
                try:
                    text = str(len(await request.body()))
                except ClientDisconnect:
                    self.events.append("gone")
                    return
            case path:
                text = path
        await PlainTextResponse(text)(scope, receive, send)

    async def connect(self, *, receive_buffer: int | None = None) -> "Client":
        connection = socket.socket()
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", self.port))
        self.clients.append(Client(*await asyncio.open_connection(sock=connection)))
        return self.clients[-1]


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def code(self) -> str:
        return str(json.loads(self.body)["error"]["code"])


@dataclass
class Client:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        with suppress(ConnectionError):  # cut off in the middle, as some tests want it
            self.writer.write(data)
            await self.writer.drain()

    async def answer(self) -> Answer:
        head = (await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 5)).decode()
        status_line, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        body = await self.reader.readexactly(int(headers.get("content-length", 0)))
        return Answer(int(status_line.split()[1]), headers, body)

    async def get(self, path: str) -> Answer:
        await self.send(request(path))
        return await self.answer()

    async def wait_closed(self, timeout_s: float = 5) -> float:
        """Seconds until the other side closed; nothing more may come."""
        started = time.monotonic()
        with suppress(ConnectionError):
            assert await asyncio.wait_for(self.reader.read(), timeout_s) == b""
        return time.monotonic() - started


def request(path: str, *headers: str, method: str = "GET", body: bytes = b"") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: x", *headers, "", ""]).encode() + body


def run(use: Callable[[Service], Awaitable[None]], **limits: Any) -> Service:
    async def serve() -> Service:
        service = Service()
        settings = LimitSettings(**{**PATIENT, **limits})
        table = ConnectionTable(settings.max_connections)
        service.tables.append(table)
        protocol: Any = partial(
            BoundedProtocol,
            limits=lambda: service.limits or settings,
            table=table,
            on_refused=service.note_refused,
        )
        config = uvicorn.Config(
            service,
            http=protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=1,
        )
        server = uvicorn.Server(config)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            service.port = listener.getsockname()[1]
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            try:
                await use(service)
            finally:
                server.should_exit = server.force_exit = True
                for client in service.clients:
                    client.writer.transport.abort()
                await serving
        return service

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve())


@pytest.fixture(autouse=True)
def quiet_log(caplog: pytest.LogCaptureFixture) -> Any:
    """Whatever a client does, the log holds short lines without its bytes, and no traceback."""
    caplog.set_level(logging.INFO)
    yield caplog
    for record in caplog.records:
        assert record.exc_info is None
        assert len(record.getMessage()) < 160 and "secret" not in record.getMessage()


async def refused(client: Client, status: int, code: str) -> None:
    answer = await client.answer()
    assert (answer.status, answer.code) == (status, code)
    assert answer.headers["connection"] == "close"
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"] == ID
    assert b"secret" not in answer.body and len(answer.body) < 500
    await client.wait_closed()


def test_one_connection_takes_many_requests() -> None:
    async def use(service: Service) -> None:
        client = await service.connect()
        for path in ("/a", "/b", "/c"):
            assert (await client.get(path)).body == path.encode()
        await client.send(request("/body", "Content-Length: 70000", method="POST", body=bytes(70000)))
        assert (await client.answer()).body == b"70000"

    run(use)


def test_a_head_of_one_byte_at_a_time_is_408() -> None:
    async def use(service: Service) -> None:
        client = await service.connect()
        started = time.monotonic()
        drip = asyncio.create_task(drip_bytes(client, b"GET /secret HTTP/1.1\r\n" * 9, pause_s=0.05))
        await refused(client, 408, "request_timeout")
        assert 0.25 < time.monotonic() - started < 3
        drip.cancel()

    run(use, **QUICK)


async def drip_bytes(client: Client, data: bytes, *, pause_s: float) -> None:
    for byte in data:
        await client.send(bytes([byte]))
        await asyncio.sleep(pause_s)


def test_a_silent_connection_is_closed_without_a_word(quiet_log: pytest.LogCaptureFixture) -> None:
    async def use(service: Service) -> None:
        client = await service.connect()
        assert 0.25 < await client.wait_closed() < 2

    run(use, **QUICK)
    assert not [record for record in quiet_log.records if record.name == "tpvision.http"]


def test_empty_lines_are_no_request() -> None:
    async def use(service: Service) -> None:
        client = await service.connect()
        drip = asyncio.create_task(drip_bytes(client, b"\r\n" * 50, pause_s=0.02))
        await refused(client, 408, "request_timeout")
        drip.cancel()

    run(use, **QUICK)


def test_an_idle_connection_is_closed() -> None:
    async def use(service: Service) -> None:
        client = await service.connect()
        await client.get("/a")
        assert 0.25 < await client.wait_closed() < 2

    run(use, **QUICK | {"header_timeout_s": 20})


def test_a_later_head_has_its_deadline_from_its_first_byte() -> None:
    async def use(service: Service) -> None:
        client = await service.connect()
        await client.get("/a")
        await asyncio.sleep(0.5)
        await client.send(b"GET /secret HT")
        started = time.monotonic()
        await refused(client, 408, "request_timeout")
        assert time.monotonic() - started > 0.25

    run(use, header_timeout_s=0.3)


@pytest.mark.parametrize(
    "data",
    [
        b"GET /" + b"secret" * 10_000,
        b"GET / HTTP/1.1\r\nHost: x\r\nX-Secret: " + b"secret" * 10_000,
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"secret" * 10_000,
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X-Secret: 12345678901234567890\r\n" * 120 * 10,
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"s:\r\n" * 200,
        b"\r\n" * 20_000,
        b"POST /body HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX-Secret: " + b"secret" * 100_000,
        b"POST /body HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"s:\r\n" * 200,
        b"POST /body HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1;" + b"secret" * 100_000,
        b"POST /body HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1;" + b"secret" * 20_000 + b"\r\ns\r\n",
    ],
    ids=["url", "value", "name", "bytes", "count", "empty", "trailer", "trailers", "chunk extension", "whole one"],
)
@pytest.mark.parametrize("piece_bytes", [500, 10**6])
def test_heads_have_a_bound(data: bytes, piece_bytes: int) -> None:
    async def use(service: Service) -> None:
        client = await service.connect()
        for start in range(0, len(data), piece_bytes):
            await client.send(data[start : start + piece_bytes])
        await refused(client, 431, "headers_too_large")

    run(use)


def test_a_head_just_under_the_bound_is_taken() -> None:
    async def use(service: Service) -> None:
        client = await service.connect()
        await client.send(request("/a", "X: " + "y" * 30_000))
        assert (await client.answer()).status == 200
        await client.send(request("/a", *(f"X-{index}: y" for index in range(120))))
        assert (await client.answer()).status == 200

    run(use)


@pytest.mark.parametrize(
    "data",
    [
        b"secret\r\n\r\n",
        b"\x16\x03\x01\x02\x00secret",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /secret HTTP/9.9\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET http://[secret HTTP/1.1\r\nHost: x\r\n\r\n",
        b"CONNECT secret:1 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nsecret\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX: a\x00secret\r\n\r\n",
        b"POST /body HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /body HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST /body HTTP/1.1\r\nHost: x\r\nContent-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\nsecret",
        b"POST /body HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999999\r\n\r\n",
    ],
)
def test_what_is_not_http(data: bytes) -> None:
    async def use(service: Service) -> None:
        client = await service.connect()
        await client.send(data)
        await refused(client, 400, "invalid_request")
        assert (await (await service.connect()).get("/a")).status == 200

    run(use)


@pytest.mark.parametrize(
    ("version", "hosts", "is_taken"),
    [
        ("1.1", [], False),
        ("1.1", ["x"], True),
        ("1.1", [""], True),
        ("1.1", [" [::1]:8000 "], True),
        ("1.1", ["x_y.example:80"], True),
        ("1.1", ["x", "x"], False),
        ("1.1", ["x", "secret"], False),
        ("1.1", ["secret secret"], False),
        ("1.1", ["secret@x"], False),
        ("1.1", ["x/secret"], False),
        ("1.1", ["x:secret"], False),
        ("1.0", [], True),
        ("1.0", ["x", "secret"], False),
    ],
)
def test_a_request_has_one_host(version: str, hosts: list[str], is_taken: bool) -> None:
    head = [f"GET /a HTTP/{version}", *(f"hOst:{host}" for host in hosts), "Upgrade: h2c", "Connection: Upgrade"]

    async def use(service: Service) -> None:
        for lines in (head[:-2], head):
            client = await service.connect()
            await client.send("\r\n".join([*lines, "", ""]).encode())
            if is_taken:
                assert (await client.answer()).status == 200
            else:
                await refused(client, 400, "invalid_request")

    run(use)


def test_a_second_host_behind_a_request_does_not_spoil_its_answer() -> None:
    async def use(service: Service) -> None:
        client = await service.connect()
        await client.send(request("/wait") + request("/secret", "Host: y"))
        await until(lambda: len(service.records) == 1)
        service.release.set()
        assert (await client.answer()).body == b"waited"
        await client.wait_closed()
        assert len(service.records) == 1

    run(use)


def test_a_broken_chunk_ends_the_request() -> None:
    async def use(service: Service) -> None:
        client = await service.connect()
        await client.send(request("/body", "Transfer-Encoding: chunked", method="POST", body=b"3\r\nabc\r\n"))
        await asyncio.sleep(0.05)
        await client.send(b"secret")
        await refused(client, 400, "invalid_request")

    service = run(use)
    assert service.events == ["gone"]
    assert [(record.status, record.code, record.client_gone) for record in service.records] == [
        (400, "invalid_request", False)
    ]
    assert service.refused == []  # the record tells of it


def test_what_is_refused_is_told_of_once() -> None:
    async def use(service: Service) -> None:
        await (await service.connect()).get("/a")
        for data in (b"secret\r\n\r\n", b"GET / HTTP/1.1\r\nHost: x\r\n" + b"s:\r\n" * 200):
            client = await service.connect()
            await client.send(data)
            await client.answer()

    service = run(use)
    assert service.refused == ["invalid_request", "headers_too_large"]
    assert [record.code for record in service.records] == [""]


def test_a_request_begins_with_its_first_byte() -> None:
    async def use(service: Service) -> None:
        client = await service.connect()
        await client.send(b"GET /a HT")
        await asyncio.sleep(0.3)
        sent = time.monotonic()
        await client.send(b"TP/1.1\r\nHost: x\r\n\r\n")
        await client.answer()
        assert 0.25 < sent - service.records[0].started < 5

    run(use)


def test_pipelined_requests_are_answered_in_order() -> None:
    async def use(service: Service) -> None:
        client = await service.connect()
        await client.send(b"".join(request(f"/{index}") for index in range(9)))
        for index in range(9):
            assert (await client.answer()).body == f"/{index}".encode()
        assert (await client.get("/a")).status == 200

    run(use)


@pytest.mark.parametrize("rest", [request("/secret") * 1000, b"secret\r\n\r\n"])
def test_too_much_or_garbage_behind_a_request_does_not_spoil_its_answer(rest: bytes) -> None:
    async def use(service: Service) -> None:
        client = await service.connect()
        await client.send(request("/wait") + rest)
        await asyncio.sleep(0.1)
        service.release.set()
        assert (await client.answer()).body == b"waited"
        await client.wait_closed()

    run(use)


def test_a_client_that_leaves_a_pipeline_is_noticed() -> None:
    async def use(service: Service) -> None:
        client = await service.connect()
        await client.send(request("/body", "Content-Length: 9", method="POST"))
        await asyncio.sleep(0.05)
        client.writer.close()
        await until(lambda: service.events == ["gone"])

    assert [record.client_gone for record in run(use).records] == [True]


INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"


def test_who_sends_no_more_but_waits_gets_its_answer() -> None:
    async def use(service: Service) -> None:
        client = await service.connect()
        await client.send(request("/wait"))
        client.writer.write_eof()
        assert await asyncio.wait_for(client.reader.readexactly(len(INTERIM)), 5) == INTERIM
        await asyncio.sleep(0.2)
        service.release.set()
        answer = await client.answer()
        assert (answer.body, answer.headers["connection"]) == (b"waited", "close")
        await client.wait_closed()

    assert [record.client_gone for record in run(use).records] == [False]


def test_who_sends_several_and_no_more_gets_all_answers() -> None:
    async def use(service: Service) -> None:
        client = await service.connect()
        await client.send(request("/wait") + request("/a") + request("/b"))
        client.writer.write_eof()
        service.release.set()
        answers = await asyncio.wait_for(client.reader.read(), 5)
        heads_and_bodies = answers.replace(INTERIM, b"").split(b"\r\n\r\n")
        assert [piece.partition(b"HTTP")[0] for piece in heads_and_bodies] == [b"", b"waited", b"/a", b"/b"]

    assert [record.client_gone for record in run(use).records] == [False] * 3


@pytest.mark.parametrize(
    ("rest", "num_more"),
    [
        (b"GET /a HT", 0),
        (request("/body", "Content-Length: 9", method="POST", body=b"1234"), 0),
        (request("/a") + request("/body", "Content-Length: 9", method="POST", body=b"1234"), 1),
        (b"\x00\x01garbage\r\n\r\n", 0),
        (request("host:1", method="CONNECT"), 0),
        (b" ", 0),
        (request("/a") * 20, 0),
    ],
    ids=["a head", "a body", "a request and a body", "garbage", "CONNECT", "a space", "too many"],
)
def test_who_sends_something_unfit_after_its_request_and_no_more_gets_its_answer(rest: bytes, num_more: int) -> None:
    async def use(service: Service) -> None:
        client = await service.connect()
        await client.send(request("/wait"))
        await until(lambda: len(service.records) == 1)
        await client.send(rest)
        client.writer.write_eof()
        await asyncio.sleep(0.2)
        service.release.set()
        answers = (await asyncio.wait_for(client.reader.read(), 5)).replace(INTERIM, b"")
        assert b"waited" in answers and answers.count(b"200 OK") == 1 + num_more

    assert not any(record.client_gone for record in run(use).records[: 1 + num_more])  # one that is not whole has left


def test_who_sends_no_more_in_the_middle_of_its_answer_gets_the_rest() -> None:
    async def use(service: Service) -> None:
        client = await service.connect(receive_buffer=4096)
        await client.send(request("/big"))
        answer = await client.reader.readuntil(b"\r\n\r\n")
        client.writer.write_eof()
        answer += await asyncio.wait_for(client.reader.read(), 20)
        assert INTERIM not in answer and len(answer) > BIG_BYTES and answer.endswith(b"0\r\n\r\n")

    run(use)


@pytest.mark.parametrize("more", [b"", b"GET /a HT"], ids=["alone", "with a part of another"])
def test_who_left_while_its_answer_is_made_is_noticed(more: bytes) -> None:
    async def use(service: Service) -> None:
        client = await service.connect()
        await client.send(request("/wait") + more)
        await asyncio.sleep(0.05)
        client.writer.close()
        await until(lambda: [record.client_gone for record in service.records] == [True])
        service.release.set()
        await asyncio.sleep(0)

    run(use)


def test_who_sends_no_more_in_the_middle_of_its_request_has_left() -> None:
    async def use(service: Service) -> None:
        client = await service.connect()
        await client.send(request("/body", "Content-Length: 9", method="POST", body=b"1234"))
        await asyncio.sleep(0.05)
        client.writer.write_eof()
        await client.wait_closed()
        assert service.events == ["gone"]

    run(use)


def test_who_sends_no_more_in_http_1_0_has_left() -> None:
    async def use(service: Service) -> None:
        client = await service.connect()
        await client.send(request("/wait").replace(b"HTTP/1.1", b"HTTP/1.0"))
        await asyncio.sleep(0.05)
        client.writer.write_eof()
        await client.wait_closed()
        assert [record.client_gone for record in service.records] == [True]
        service.release.set()
        await asyncio.sleep(0)

    run(use)


def test_who_sends_no_more_on_an_idle_connection_is_closed() -> None:
    async def use(service: Service) -> None:
        client = await service.connect()
        await client.get("/a")
        client.writer.write_eof()
        await client.wait_closed()

    run(use)


async def until(condition: Callable[[], bool], timeout_s: float = 5) -> float:
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout_s
        await asyncio.sleep(0.02)
    return time.monotonic() - started


@pytest.mark.parametrize("piece_bytes", [1, 40, 10**6])
@pytest.mark.parametrize("wish", ["h2c", "websocket", "secret/2.0, secret"])
def test_upgrades_are_declined_and_nothing_is_lost(wish: str, piece_bytes: int) -> None:
    headers = ("Connection: Upgrade, HTTP2-Settings", f"Upgrade: {wish}", "HTTP2-Settings: AAEAAEAA")
    chunked = b"5\r\nhello\r\n2\r\n!!\r\n0\r\n\r\n"
    data = (
        request("/a", *headers)
        + request("/body", *headers, "Content-Length: 5", method="POST", body=b"hello")
        + request("/body", *headers, "Transfer-Encoding: chunked", method="POST", body=chunked)
        + request("/b")
    )

    async def use(service: Service) -> None:
        client = await service.connect()
        for start in range(0, len(data), piece_bytes):
            await client.send(data[start : start + piece_bytes])
        for expected in (b"/a", b"5", b"7", b"/b"):
            answer = await client.answer()
            assert (answer.status, answer.body) == (200, expected)

    run(use)


def test_a_head_with_a_wish_to_upgrade_has_the_same_bounds() -> None:
    async def use(service: Service) -> None:
        client = await service.connect()
        await client.send(request("/a", "Connection: Upgrade", "Upgrade: h2c", *(f"s-{n}: y" for n in range(200))))
        await refused(client, 431, "headers_too_large")

    run(use)


@pytest.mark.parametrize("chunk_bytes", [1, 8])
def test_a_body_of_tiny_chunks_is_refused_before_it_costs_anything(chunk_bytes: int) -> None:
    flood = (f"{chunk_bytes:x}\r\n".encode() + b"s" * chunk_bytes + b"\r\n") * 40_000

    async def use(service: Service) -> None:
        clients = [await service.connect() for _ in range(50)]
        started = time.monotonic()
        for client in clients:
            client.writer.write(request("/body", "Transfer-Encoding: chunked", method="POST", body=flood))
        await refused(clients[0], 400, "invalid_request")
        assert (await (await service.connect()).get("/a")).status == 200
        assert time.monotonic() - started < 2

    run(use)


@pytest.mark.parametrize(("chunk_bytes", "num_chunks"), [(1, 900), (40, 5000), (5000, 100)])
def test_small_chunks_are_taken_within_reason(chunk_bytes: int, num_chunks: int) -> None:
    chunk = f"{chunk_bytes:x}\r\n".encode() + b"x" * chunk_bytes + b"\r\n"

    async def use(service: Service) -> None:
        client = await service.connect()
        for _ in range(2):  # the bound is each body's own
            await client.send(request("/body", "Transfer-Encoding: chunked", method="POST", body=chunk * num_chunks))
            await client.send(b"0\r\n\r\n")
            assert (await client.answer()).body == str(chunk_bytes * num_chunks).encode()

    run(use)


def test_bytes_that_trickle_in_are_no_chunks() -> None:
    async def use(service: Service) -> None:
        client = await service.connect()
        client.writer.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await client.send(request("/body", "Content-Length: 1500", method="POST"))
        for _ in range(1500):
            await client.send(b"x")
            await asyncio.sleep(0)
        assert (await client.answer()).body == b"1500"

    run(use)


def test_what_follows_an_early_answer_is_thrown_away_for_a_while() -> None:
    async def use(service: Service) -> None:
        client = await service.connect()
        await client.send(request("/a", "Content-Length: 100", method="POST", body=b"x"))
        assert (await client.answer()).status == 200
        drip = asyncio.create_task(drip_bytes(client, b"x" * 98, pause_s=0.05))
        assert 0.2 < await client.wait_closed() < 2
        drip.cancel()
        client = await service.connect()
        await client.send(request("/a", "Content-Length: 100", method="POST", body=b"x" * 50))
        assert (await client.answer()).status == 200
        await client.send(b"x" * 50)
        assert (await client.get("/b")).body == b"/b"

    run(use, header_timeout_s=0.3)


def test_one_more_connection_takes_the_place_of_the_longest_idle_one() -> None:
    async def use(service: Service) -> None:
        clients = [await service.connect() for _ in range(3)]
        assert (await clients[0].get("/a")).status == 200  # now the one that waits shortest
        newest = await service.connect()
        assert (await newest.get("/b")).status == 200
        assert await clients[1].wait_closed() < 1
        for client in (clients[0], clients[2], newest):
            assert (await client.get("/c")).status == 200

    run(use, max_connections=3)


def test_who_was_answered_before_the_end_of_its_body_is_not_busy() -> None:
    async def use(service: Service) -> None:
        for _ in range(9):
            client = await service.connect()
            await client.send(request("/a", "Content-Length: 100", method="POST"))
            assert (await client.answer()).status == 200

    run(use, max_connections=3)


def test_where_all_are_busy_only_probes_are_answered() -> None:
    async def use(service: Service) -> None:
        busy = [await service.connect() for _ in range(3)]
        for client in busy:
            await client.send(request("/wait"))
        await asyncio.sleep(0.1)
        probe, other = await service.connect(), await service.connect()
        assert (await probe.get("/livez?x=1")).status == 200
        await other.send(request("/secret"))
        answer = await other.answer()
        assert (answer.status, answer.code, answer.headers["retry-after"]) == (429, "overloaded", "1")
        await other.wait_closed()
        assert (await probe.get("/readyz")).status == 200
        silent = [await service.connect() for _ in range(100)]  # more than there are places in reserve
        assert (await (await service.connect()).get("/health")).status == 200
        assert await silent[0].wait_closed() < 1
        service.release.set()
        for client in busy:
            assert (await client.answer()).body == b"waited"
        assert (await busy[0].get("/d")).status == 200

    run(use, max_connections=3)


def test_an_answer_that_is_not_read_is_cut_off(quiet_log: pytest.LogCaptureFixture) -> None:
    async def use(service: Service) -> None:
        client = await service.connect(receive_buffer=4096)
        await client.send(request("/big"))
        assert 0.25 < await until(lambda: service.events == ["big sent"]) < 3

    run(use, **QUICK)
    assert f"closed: an answer was not read for 0.3 s id={ID}" in [record.getMessage() for record in quiet_log.records]


def test_an_answer_that_is_read_slowly_arrives() -> None:
    async def use(service: Service) -> None:
        client = await service.connect(receive_buffer=2**18)
        await client.send(request("/big", "Connection: close"))
        started, num_bytes = time.monotonic(), 0
        while piece := await client.reader.read(2**17):
            num_bytes += len(piece)
            await asyncio.sleep(0.01)
        assert num_bytes > BIG_BYTES
        assert time.monotonic() - started > 1

    run(use, **QUICK)


def test_an_answer_is_complete_only_when_it_is_read() -> None:
    async def use(service: Service) -> None:
        client = await service.connect(receive_buffer=4096)
        await client.send(request("/big"))
        await asyncio.sleep(0.5)
        assert service.events == []
        while service.events == []:
            await client.reader.read(2**20)

    run(use)


def test_an_open_connection_takes_other_limits_over_with_its_next_request() -> None:
    long = request("/long", f"x-long: {'x' * 1500}")

    async def use(service: Service) -> None:
        client = await service.connect()
        await client.send(request("/wait"))
        service.limits = LimitSettings(**PATIENT, max_header_bytes=1024)
        service.release.set()
        assert (await client.answer()).body == b"waited"
        await client.send(long)
        assert (await client.answer()).code == "headers_too_large"
        service.limits = None
        again = await service.connect()
        await again.send(long)
        assert (await again.answer()).status == 200

    run(use)


def test_fewer_connections_than_there_are_close_idle_ones_as_others_come() -> None:
    async def use(service: Service) -> None:
        first = [await service.connect() for _ in range(4)]
        for client in first:
            assert (await client.get("/here")).status == 200
        service.tables[0].max_connections = 2
        last = await service.connect()
        assert (await last.get("/here")).status == 200
        for client in first[:3]:
            await client.wait_closed()
        assert (await first[3].get("/here")).status == 200

    run(use, max_connections=10)
