"""Hostile HTTP against a real service: whatever is sent, it stays alive, small, quiet, and right.

Around every test /livez is polled from a thread over fresh connections, and the same picture is encoded before and
after. The figures are printed: `pytest -rP tests/test_hostile_http.py`.
"""

import base64
import gzip
import json
import logging
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from PIL import Image
from running import GOLDEN, RunningService, assert_balanced, wait_until

log = logging.getLogger("tests")

GOOD = (GOLDEN / "images" / "rgb_64x48.png").read_bytes()
LIMITS = {
    "TPVISION_LIMITS__HEADER_TIMEOUT_S": "2",
    "TPVISION_LIMITS__BODY_TIMEOUT_S": "3",
    "TPVISION_LIMITS__SEND_TIMEOUT_S": "2",
}
MAX_LIVEZ_S = 1.0
MAX_GROWTH_BYTES = 40 * 2**20


class Watch:
    """Polls /livez on new connections, and the size of the front-end, until it is stopped."""

    def __init__(self, service: RunningService) -> None:
        self._address = address_of(service)
        self._pid = service.process.pid
        self.latencies_s: list[float] = []
        self.peak_bytes = self.first_bytes = self._resident_bytes()
        self.peak_body_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        wait_until(lambda: len(self.latencies_s) >= 5 or not self._thread.is_alive())
        self._stop.set()
        self._thread.join(10)

    def report(self) -> str:
        ordered = sorted(self.latencies_s)
        return (
            f"/livez {len(ordered)} times: p50 {ordered[len(ordered) // 2] * 1000:.1f} ms, "
            f"p99 {ordered[int(len(ordered) * 0.99)] * 1000:.1f} ms, max {ordered[-1] * 1000:.1f} ms; "
            f"resident {self.first_bytes / 1e6:.1f} MB, peak {self.peak_bytes / 1e6:.1f} MB; "
            f"bodies held at most {self.peak_body_bytes / 1e6:.1f} MB"
        )

    def _run(self) -> None:
        while not self._stop.wait(0.02):
            started = time.monotonic()
            with socket.create_connection(self._address, timeout=10) as connection:
                connection.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                assert connection.recv(100).startswith(b"HTTP/1.1 200")
            self.latencies_s.append(time.monotonic() - started)
            self.peak_bytes = max(self.peak_bytes, self._resident_bytes())
            self.peak_body_bytes = max(self.peak_body_bytes, self._body_bytes())

    def _resident_bytes(self) -> int:
        status = Path(f"/proc/{self._pid}/status").read_text()
        anonymous = next(line for line in status.splitlines() if line.startswith("RssAnon"))
        return int(anonymous.split()[1]) * 1024

    def _body_bytes(self) -> int:
        """Memory files of request bodies; they are not resident in any process."""
        total = 0
        for link in Path(f"/proc/{self._pid}/fd").iterdir():
            with suppress(OSError):
                if "tpvision-body" in str(link.readlink()):
                    total += link.stat().st_blocks * 512
        return total


def address_of(service: RunningService) -> tuple[str, int]:
    parts = urlsplit(service.url)
    assert parts.hostname is not None and parts.port is not None
    return parts.hostname, parts.port


@pytest.fixture(scope="module")
def service(start_service: Any) -> RunningService:
    started: RunningService = start_service("--model", str(GOLDEN / "tiny-k3-f32"), "--tp", "2", **LIMITS)
    for _ in range(3):
        started.encode(GOOD)
    return started


@pytest.fixture
def watch(service: RunningService) -> Iterator[Watch]:
    before = service.encode(GOOD, output="pooled").content
    num_lines = len(service.log)
    watch = Watch(service)
    yield watch
    watch.stop()
    log.warning("%s", watch.report())
    assert max(watch.latencies_s) < MAX_LIVEZ_S
    assert watch.peak_bytes - watch.first_bytes < MAX_GROWTH_BYTES
    after = service.encode(GOOD, output="pooled")
    assert after.status_code == 200
    assert after.content[-512:] == before[-512:]
    wait_until(lambda: service.client.get("/v1/capacity").json()["in_flight"]["bytes"] == 0)
    assert_balanced(service)
    for line in service.log[num_lines:]:
        assert len(line) < 2500 and "secret" not in line and "Traceback" not in line, line


@pytest.fixture(autouse=True)
def _always_watched(watch: Watch) -> None:
    """No test without it."""


@dataclass
class Peer:
    """One raw connection, and what came back on it."""

    connection: socket.socket
    received: bytes = b""
    closed_after_s: float | None = None
    waiting: bytes = field(default=b"", repr=False)  # to be dripped

    @property
    def status(self) -> int:
        return int(self.received.split(b" ", 2)[1]) if self.received else 0

    @property
    def code(self) -> str:
        return str(json.loads(self.received.partition(b"\r\n\r\n")[2])["error"]["code"])


@pytest.fixture
def peers(service: RunningService) -> Iterator["Peers"]:
    with ExitStack() as stack:
        yield Peers(address_of(service), stack)


class Peers:
    """Many raw connections at a time, driven by one selector."""

    def __init__(self, address: tuple[str, int], stack: ExitStack) -> None:
        self._address = address
        self._stack = stack

    def connect(self, first: bytes = b"", *, drip: bytes = b"", receive_buffer: int | None = None) -> Peer:
        connection = self._stack.enter_context(socket.socket())
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(10)
        connection.connect(self._address)
        connection.sendall(first)
        return Peer(connection, waiting=drip)

    def drive(self, peers: list[Peer], *, pause_s: float, timeout_s: float) -> None:
        """Send one waiting byte of each every `pause_s`, and collect answers until all are closed."""
        started = time.monotonic()
        with selectors.DefaultSelector() as selector:
            for peer in peers:
                peer.connection.setblocking(False)
                selector.register(peer.connection, selectors.EVENT_READ, peer)
            next_drip = started
            while selector.get_map():
                now = time.monotonic()
                assert now - started < timeout_s, f"{len(selector.get_map())} connections are still open"
                if now >= next_drip:
                    next_drip = now + pause_s
                    for peer in peers:
                        drip_byte(peer)
                for key, _ in selector.select(0.05):
                    if not receive(key.data):
                        key.data.closed_after_s = time.monotonic() - started
                        selector.unregister(key.data.connection)


def drip_byte(peer: Peer) -> None:
    if peer.waiting and peer.closed_after_s is None:
        with suppress(OSError):
            peer.connection.send(peer.waiting[:1])
        peer.waiting = peer.waiting[1:]


def receive(peer: Peer) -> bool:
    """Whether more may come."""
    try:
        data = peer.connection.recv(2**16)
    except BlockingIOError:
        return True
    except ConnectionError:
        return False
    peer.received += data
    return bool(data)


def head(path: str, *headers: str, method: str = "POST") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: x", *headers, "", ""]).encode()


def test_a_body_of_200_mb_without_a_length_is_not_kept(service: RunningService, peers: Peers, watch: Watch) -> None:
    peer = peers.connect(head("/v1/encode", "Transfer-Encoding: chunked", "Connection: close"))
    chunk = b"100000\r\n" + bytes(2**20) + b"\r\n"
    for _ in range(200):
        peer.connection.sendall(chunk)
    peer.connection.sendall(b"0\r\n\r\n")
    while receive(peer):
        pass
    assert (peer.status, peer.code) == (413, "body_too_large")
    assert watch.peak_body_bytes <= 64 * 2**20 + 4096


def test_200_bodies_of_tiny_chunks_cost_nobody_a_moment(peers: Peers) -> None:
    flood = b"1\r\ns\r\n" * 40_000
    floods = [peers.connect(head("/v1/encode", "Transfer-Encoding: chunked")) for _ in range(200)]
    for peer in floods:
        peer.connection.setblocking(False)
        with suppress(OSError):
            peer.connection.send(flood)
    peers.drive(floods, pause_s=60, timeout_s=10)
    assert {(peer.status, peer.code) for peer in floods} == {(400, "invalid_request")}


@pytest.mark.parametrize(("path", "length", "status"), [("/nothing", 5, 404), ("/v1/encode", 10**9, 413)])
def test_a_body_that_is_not_asked_for_is_not_waited_for(peers: Peers, path: str, length: int, status: int) -> None:
    peer = peers.connect(head(path, f"Content-Length: {length}", "Expect: 100-continue"))
    while receive(peer):
        pass
    assert peer.status == status and b"\r\nconnection: close\r\n" in peer.received


@pytest.mark.parametrize("declared", [True, False])
def test_200_slow_bodies_end_at_their_deadline(peers: Peers, watch: Watch, declared: bool) -> None:
    length = "Content-Length: 1000" if declared else "Transfer-Encoding: chunked"
    first = head("/v1/encode", length) + (b"s" if declared else b"3e8\r\n")
    slow = [peers.connect(first, drip=b"secret" * 20) for _ in range(200)]
    peers.drive(slow, pause_s=0.5, timeout_s=12)
    assert {(peer.status, peer.code) for peer in slow} == {(408, "request_timeout")}


def test_200_slow_heads_end_at_their_deadline(peers: Peers, watch: Watch) -> None:
    slow = [peers.connect(b"POST /secret", drip=b"secret" * 20) for _ in range(200)]
    peers.drive(slow, pause_s=0.5, timeout_s=8)
    assert {(peer.status, peer.code) for peer in slow} == {(408, "request_timeout")}
    assert all(peer.closed_after_s is not None and peer.closed_after_s < 5 for peer in slow)


@pytest.mark.slow
def test_200_senders_of_a_byte_in_5_s_under_the_default_deadlines(start_service: Any) -> None:
    service = start_service("--model", str(GOLDEN / "tiny-k3-f32"))
    before = service.encode(GOOD, output="pooled").content
    own_watch = Watch(service)  # the fixture's looks at the other service
    with ExitStack() as stack:
        stack.callback(own_watch.stop)
        peers = Peers(address_of(service), stack)
        slow = [peers.connect(b"GET /", drip=b"s" * 99) for _ in range(100)]
        slow += [peers.connect(head("/v1/encode", "Content-Length: 99"), drip=b"s" * 99) for _ in range(100)]
        peers.drive(slow, pause_s=5, timeout_s=90)
    assert {peer.status for peer in slow} == {408}
    assert max(peer.closed_after_s or 99 for peer in slow[:100]) < 15
    assert max(peer.closed_after_s or 99 for peer in slow[100:]) < 75
    log.warning("%s", own_watch.report())
    assert max(own_watch.latencies_s) < MAX_LIVEZ_S
    assert service.encode(GOOD, output="pooled").content[-512:] == before[-512:]


def test_2000_connections_opened_and_dropped(service: RunningService, peers: Peers, watch: Watch) -> None:
    kinds = [b"", b"GET /secr", head("/v1/encode", "Content-Length: 99") + b"secret", head("/livez", method="GET")]
    opened = []
    for index in range(2000):  # twice what may be open
        opened.append(peers.connect(kinds[index % len(kinds)]))
        if index % 50 == 0:
            time.sleep(0.1)  # so that the figure is the service's, and not that of this process's one lock
    num_files = len(list(Path(f"/proc/{service.process.pid}/fd").iterdir()))
    assert num_files < 3000
    for peer in opened:
        peer.connection.close()
    wait_until(lambda: len(list(Path(f"/proc/{service.process.pid}/fd").iterdir())) < 100)


@pytest.mark.parametrize(
    "data",
    [
        head("/v1/encode", "X-Secret: " + "secret" * 200_000),
        head("/v1/encode?" + "secret=1&" * 100_000),
        head("/v1/encode", *(f"X-Secret-{index}: 1" for index in range(50_000))),
    ],
    ids=["one header", "url", "many headers"],
)
def test_heads_of_a_megabyte(peers: Peers, data: bytes) -> None:
    peer = peers.connect()
    with suppress(ConnectionError):
        peer.connection.sendall(data)
    while receive(peer):
        pass
    assert (peer.status, peer.code) == (431, "headers_too_large")


def test_lines_that_are_not_http_are_answered_and_logged_shortly(service: RunningService, peers: Peers) -> None:
    num_requests = len(service.requests)
    lines = [
        b"secret\r\n\r\n",
        b"\x16\x03\x01secret",
        b"POST /secret HTTP/7\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nsecret\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: secret\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nHost: secret\r\n\r\n",
    ]
    for line in lines:
        peer = peers.connect(line)
        while receive(peer):
            pass
        assert (peer.status, peer.code) == (400, "invalid_request")
    logged = [line for line in service.requests[num_requests:] if (line["status"], line["route"]) == (400, "other")]
    assert len(logged) == len(lines)


@pytest.mark.parametrize("content_type", ["image/png", "application/json", "multipart/form-data; boundary=x"])
@pytest.mark.parametrize("coding", ["gzip", "deflate", "br, gzip", "x-secret"])
def test_encoded_bodies_are_not_taken(service: RunningService, content_type: str, coding: str) -> None:
    bomb = gzip.compress(bytes(50 * 2**20))
    headers = {"content-type": content_type, "content-encoding": coding}
    answer = service.client.post("/v1/encode", content=bomb, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
    assert "Content-Encoding" in answer.json()["error"]["message"]


def test_identity_is_no_encoding(service: RunningService) -> None:
    assert service.client.post("/v1/encode", content=GOOD, headers={"content-encoding": "Identity"}).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b'{"images": ' + b"[" * 5_000_000,
        b'{"images": ' + b'{"a":' * 2_000_000,
        b"[" * 50_000_000,
        b'{"images": [' + b"0," * 10_000_000 + b"0]}",
        b'{"images": [NaN]}',
        b'{"images": [Infinity, -Infinity]}',
        b'{"images": [1e999999]}',
        b'{"images": [' + b"9" * 1_000_000 + b"]}",
        b'{"images": ["\\ud800"]}',
        b'{"images": ["\xff\xfe"]}',
        b'{"' + b"secret" * 1_000_000 + b'": 1}',
        '{"images": ["é"]}'.encode("utf-16"),
        bytes(1000),
        GOOD,
    ],
    ids=range(14),
)
@pytest.mark.parametrize("route", ["encode", "embeddings"])
def test_json_that_is_meant_to_hurt(service: RunningService, route: str, body: bytes) -> None:
    content = body if route == "encode" else body.replace(b'"images"', b'"input"', 1)
    answer = service.client.post(f"/v1/{route}", content=content, headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "invalid_request"), error
    assert len(answer.content) < 1000


def test_an_answer_that_is_not_read_is_released(service: RunningService, peers: Peers) -> None:
    picture = BytesIO()
    Image.new("RGB", (308, 308), "teal").save(picture, "PNG")
    body = json.dumps({"images": [base64.b64encode(picture.getvalue()).decode()] * 64}).encode()
    headers = ("Accept: application/json", "Content-Type: application/json", f"Content-Length: {len(body)}")

    def held() -> int:
        return int(service.client.get("/v1/capacity").json()["in_flight"]["bytes"])

    num_lines = len(service.log)
    reader = peers.connect(head("/v1/encode", *headers) + body, receive_buffer=4096)  # 10 MB, of which TCP holds 4
    wait_until(lambda: held() > 8 * 2**20, timeout_s=60)
    wait_until(lambda: any("closed: an answer was not read for 2 s" in line for line in service.log[num_lines:]))
    wait_until(lambda: held() == 0)
    reader.connection.close()


def test_clients_that_leave_are_no_faults(service: RunningService, peers: Peers) -> None:
    post = head("/v1/encode", f"Content-Length: {len(GOOD)}") + GOOD
    for cut in (10, len(post) // 2, len(post) - 1, len(post)):
        for _ in range(20):
            peers.connect(post[:cut]).connection.close()
    assert service.client.get("/readyz").status_code == 200


def test_a_chunked_image_is_an_image(service: RunningService) -> None:
    pieces = (GOOD[start : start + 100] for start in range(0, len(GOOD), 100))
    assert service.client.post("/v1/encode", content=pieces).status_code == 200


def test_request_ids_are_taken_only_where_they_are_harmless(service: RunningService, peers: Peers) -> None:
    def answered(value: bytes) -> str:
        peer = peers.connect(
            b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Request-Id: " + value + b"\r\n\r\n"
        )
        while receive(peer):
            pass
        lines = peer.received.partition(b"\r\n\r\n")[0].lower().split(b"\r\n")
        assert b"x-evil: 1" not in lines
        return next(line.partition(b": ")[2].decode("latin-1") for line in lines if line.startswith(b"x-request-id"))

    for good in (b"a", b"req_1.2:3-4", b"x" * 128):
        assert answered(good) == answered(b" \t" + good + b" \t ") == good.decode()
    for bad in (
        b"",
        b"x" * 129,
        "é".encode(),
        b"secret id",
        b"secret%0d%0aX-Evil: 1",
        b"a\r\nX-Evil: 1",
        b"a;b",
        b"\x85",
    ):
        assert answered(bad) != bad.decode("latin-1").partition("\r")[0] or bad.startswith(b"a\r")


def test_answers_carry_their_request_id_also_as_errors(service: RunningService) -> None:
    answer = httpx.get(f"{service.url}/nothing", headers={"x-request-id": "mine"}, trust_env=False)
    assert (answer.status_code, answer.headers["x-request-id"]) == (404, "mine")
