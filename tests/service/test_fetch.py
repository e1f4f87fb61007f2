"""Real servers on loopback, with a resolver that knows made-up names. 127.0.0.1 plays a public address here and
127.0.0.2 a private one, where nothing may ever connect."""

import asyncio
import gzip
import json
import os
import socket
import ssl
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from ipaddress import ip_address
from typing import Any

import httpx
import pytest
import trustme
from running import GOLDEN, REFERENCE_IMAGES, RunningService, wait_until

from service import fetch as module
from service.addresses import Address, is_public
from service.body import Body
from service.errors import BodyTooLarge, InvalidRequest, Overloaded, ServiceError, UrlFetchFailed
from service.fetch import Fetcher, SystemResolver
from tp.settings import UrlSettings

PUBLIC, PRIVATE = "127.0.0.1", "127.0.0.2"
NAMES: dict[str, list[list[str]]] = {  # the addresses of each name, by how often it was asked for
    "images.test": [[PUBLIC]],
    "other.test": [[PUBLIC]],
    "private.test": [[PRIVATE]],
    "mixed.test": [[PUBLIC, PRIVATE]],
    "mixed-too.test": [[PRIVATE, PUBLIC]],
    "mapped.test": [[f"::ffff:{PRIVATE}"]],
    "metadata.test": [["169.254.169.254"]],
    "rebinding.test": [[PUBLIC], [PRIVATE]],
    "half-dead.test": [["127.0.0.3", PUBLIC]],  # nobody listens at the first
    "empty.test": [[]],
}
IMAGE = bytes(range(256)) * 1000

Page = bytes | Callable[[asyncio.StreamWriter], Awaitable[None]]


def page(body: bytes = IMAGE, status: str = "200 OK", **headers: object) -> bytes:
    lines = {"content-length": len(body), **{name.replace("_", "-"): value for name, value in headers.items()}}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value is not None)
    return f"HTTP/1.1 {status}\r\n{head}\r\n".encode() + body


def redirect(location: str, status: int = 302) -> bytes:
    return page(b"moved", f"{status} Found", location=location)


@dataclass
class Web:
    """One port on both addresses, and what was asked of it and of the resolver."""

    pages: dict[str, Page]
    tls: ssl.SSLContext | None = None
    port: int = 0
    heads: list[str] = field(default_factory=list)
    resolved: list[str] = field(default_factory=list)
    num_private: int = 0
    num_open: int = 0
    most_open: int = 0

    async def start(self, stack: AsyncExitStack) -> None:
        public = await asyncio.start_server(self._serve, PUBLIC, 0, ssl=self.tls)
        await stack.enter_async_context(public)
        self.port = public.sockets[0].getsockname()[1]
        await stack.enter_async_context(await asyncio.start_server(self._count_private, PRIVATE, self.port))

    async def resolve(self, host: str, port: int) -> Sequence[Address]:
        if host not in NAMES:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        answers = NAMES[host]
        answer = answers[min(self.resolved.count(host), len(answers) - 1)]
        self.resolved.append(host)
        return [ip_address(address) for address in answer]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.heads.append(head)
            content = self.pages.get(head.split()[1], page(b"?", "404 Not Found"))
            if callable(content):
                await content(writer)
            else:
                writer.write(content.replace(b"PORT", str(self.port).encode()))
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.num_open -= 1
            writer.close()

    async def _count_private(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_private += 1
        writer.close()


def fetch_from(
    web: Web,
    *urls: str,
    max_bytes: int = 10**6,
    inline_bytes: int = 0,
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
    authority: ssl.SSLContext | None = None,
    is_allowed: Callable[[Address], bool] = lambda address: str(address) in (PUBLIC, "127.0.0.3"),
    **rules: Any,
) -> list[bytes]:
    """The images at these URLs, PORT in them standing for the web's, fetched where http is allowed unless said."""

    async def run() -> list[bytes]:
        async with AsyncExitStack() as stack:
            await web.start(stack)
            settings = UrlSettings(**{"fetch": "on", "allow_http": True, "allowed_ports": [web.port], **rules})
            fetcher = Fetcher(settings, resolve=web.resolve, is_allowed=is_allowed, tls=authority or NO_AUTHORITY)
            body = stack.enter_context(Body())
            wanted = {f"images[{index}]": url.replace("PORT", str(web.port)) for index, url in enumerate(urls)}
            images = await fetcher.fetch(
                wanted, body, max_bytes=max_bytes, inline_bytes=inline_bytes, on_bytes=on_bytes
            )
            return [os.pread(image.fd, image.length, image.offset) for image in images]

    return asyncio.run(asyncio.wait_for(run(), 20))


NO_AUTHORITY = ssl.create_default_context(cadata=trustme.CA().cert_pem.bytes().decode())
A = "http://images.test:PORT/a"


def get(content: Page, **options: Any) -> bytes:
    return fetch_from(Web({"/a": content}), A, **options)[0]


def refused(error: type[ServiceError], web: Web, *urls: str, **options: Any) -> ServiceError:
    """The error, which must not repeat anything that it was told; nothing reached the private address."""
    with pytest.raises(error) as caught:
        fetch_from(web, *(urls or [A]), **options)
    assert web.num_private == 0
    said = json.dumps(caught.value.as_dict())
    assert not [word for word in ("test", "http:", "127.", "secret", str(web.port)) if word in said]
    return caught.value


def failed(content: Page, **options: Any) -> ServiceError:
    return refused(UrlFetchFailed, Web({"/a": content}), **options)


def test_images_in_order() -> None:
    web = Web({f"/{index}": page(bytes([index]) * (5 - index)) for index in range(5)})
    images = fetch_from(web, *(f"http://images.test:PORT/{index}" for index in range(5)))
    assert images == [bytes([index]) * (5 - index) for index in range(5)]


def test_what_a_server_is_sent() -> None:
    web = Web({"/a?b=%20c": page()})
    fetch_from(web, "http://Images.test.:PORT/a?b=%20c#secret")
    request, *headers = web.heads[0].rstrip().split("\r\n")
    assert request == "GET /a?b=%20c HTTP/1.1"
    assert {line.partition(": ")[0].lower() for line in headers} == {
        *("host", "accept", "accept-encoding", "connection", "user-agent")
    }
    assert f"Host: images.test:{web.port}" in headers and "Accept-Encoding: identity" in headers


@pytest.mark.parametrize("chunked", [b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"])
def test_chunked_bodies_and_bodies_without_a_length(chunked: bytes) -> None:
    assert get(page(chunked, content_length=None, transfer_encoding="chunked")) == b"abcde"
    assert get(page(content_length=None)) == IMAGE


@pytest.mark.parametrize(
    "host",
    [
        "private.test",
        "mixed.test",
        "mixed-too.test",
        "mapped.test",
        "metadata.test",
        "empty.test",
        "unknown.test",
        PRIVATE,
        f"[::ffff:{PRIVATE}]",
        "[::1]",
        "169.254.169.254",
        "10.0.0.1",
    ],
)
def test_hosts_with_an_address_that_is_not_public(host: str) -> None:
    messages = {
        refused(InvalidRequest, Web({"/a": page()}), f"http://{name}:PORT/a").message for name in (host, "unknown.test")
    }
    assert len(messages) == 1


@pytest.mark.parametrize(
    "host",
    [
        PUBLIC,
        "localhost",
        "[::1]",
        f"[::ffff:{PUBLIC}]",
        "0.0.0.0",
        "[::]",
        "0x7f000001",
        "2130706433",
        "127.1",
        "0177.0.0.1",
    ],
)
def test_loopback_by_any_name_is_refused_by_the_real_predicate_and_resolver(host: str) -> None:
    class Real(Web):
        async def resolve(self, host: str, port: int) -> Sequence[Address]:
            return await SystemResolver()(host, port)

    web = Real({"/a": page()})
    refused(InvalidRequest, web, f"http://{host}:PORT/a", is_allowed=is_public)
    assert web.heads == []


def test_the_real_resolver_gives_addresses_and_raises_for_none() -> None:
    async def run() -> None:
        resolve = SystemResolver()
        assert ip_address(PUBLIC) in await resolve("localhost", 80)
        for name in ("", "a" * 64 + ".test"):
            with pytest.raises((OSError, UnicodeError)):
                await resolve(name, 80)

    asyncio.run(run())


def test_names_without_an_answer_hold_up_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()

    def look_up(host: str, port: int, **options: Any) -> Any:
        if host.startswith("slow"):
            answers.wait(20)
            raise socket.gaierror
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (PUBLIC, port))]

    monkeypatch.setattr(module.socket, "getaddrinfo", look_up)

    async def leave(resolve: SystemResolver, num_names: int) -> None:
        """As many requests as this that end before their name has an answer."""
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await asyncio.gather(*(resolve(f"slow-{index}", 80) for index in range(num_names)))

    async def run() -> None:
        resolve = SystemResolver()
        for _ in range(4):
            await leave(resolve, 16)
            async with asyncio.timeout(2):
                assert await resolve("good", 80) == [ip_address(PUBLIC)]
        for _ in range(9):
            await leave(resolve, 100)
        lookups = [thread for thread in threading.enumerate() if thread.name == "name lookup"]
        assert len(lookups) == 100  # however many ask
        assert all(thread.daemon for thread in lookups)  # the process can end
        answers.set()
        async with asyncio.timeout(2):
            assert await resolve("good", 80) == [ip_address(PUBLIC)]

    asyncio.run(run())


def test_lookups_without_room_for_a_thread_keep_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def run() -> None:
        resolve = SystemResolver()
        with monkeypatch.context() as full:
            full.setattr(threading.Thread, "start", refuse)
            for _ in range(101):
                with pytest.raises(OSError, match="no thread"):
                    await resolve("localhost", 80)
        async with asyncio.timeout(5):
            assert ip_address(PUBLIC) in await resolve("localhost", 80)

    asyncio.run(run())


def test_a_product_fetcher_has_the_real_predicate_and_resolver() -> None:
    fetcher = Fetcher(UrlSettings(fetch="on"))
    assert (type(fetcher._resolve), fetcher._is_allowed) == (SystemResolver, is_public)


def test_a_name_that_changes_its_address_is_resolved_once() -> None:
    web = Web({"/a": page()})
    assert fetch_from(web, "http://rebinding.test:PORT/a") == [IMAGE]
    assert web.resolved == ["rebinding.test"] and web.num_private == 0


def test_a_name_that_changes_its_address_between_hops_is_refused() -> None:
    web = Web({"/a": redirect("/b"), "/b": page()})
    refused(InvalidRequest, web, "http://rebinding.test:PORT/a")
    assert web.resolved == ["rebinding.test"] * 2 and len(web.heads) == 1


def test_the_next_address_is_tried_where_one_does_not_answer() -> None:
    assert fetch_from(Web({"/a": page()}), "http://half-dead.test:PORT/a") == [IMAGE]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_followed_and_resolved_anew(status: int) -> None:
    web = Web({"/a": redirect("b?c", status), "/b?c": redirect("//other.test:PORT/d", status), "/d": page()})
    assert fetch_from(web, A) == [IMAGE]
    assert web.resolved == ["images.test", "images.test", "other.test"]
    assert [head.split()[4].partition(":")[0] for head in web.heads] == ["images.test", "images.test", "other.test"]


@pytest.mark.parametrize(
    "location",
    [
        f"http://{PRIVATE}:PORT/",
        "http://private.test:PORT/",
        "http://mixed.test:PORT/",
        "http://169.254.169.254:PORT/secret",
        "http://[::1]:PORT/",
        "http://2130706434:PORT/",
        "http://user:secret@images.test:PORT/",
        "http://images.test:22/",
        "ftp://images.test:PORT/",
        "file:///etc/hostname",
        "data:image/png;base64,QUJD",
        "//[",
        "",
    ],
)
def test_redirects_to_what_is_refused(location: str) -> None:
    web = Web({"/a": redirect(location)})
    error = refused(UrlFetchFailed if location == "" else InvalidRequest, web)
    assert error.param == "images[0]"


def test_redirects_to_http_where_only_https_is_fetched() -> None:
    authority = trustme.CA()
    web = Web({"/a": redirect("http://images.test:PORT/")}, tls=server_context(authority, "images.test"))
    refused(InvalidRequest, web, "https://images.test:PORT/a", authority=trusting(authority), allow_http=False)


def test_redirects_off_the_list_of_hosts() -> None:
    web = Web({"/a": redirect("//other.test:PORT/a")})
    refused(InvalidRequest, web, allowed_hosts=["images.test"])
    assert web.resolved == ["images.test"]


def test_redirect_loops_end() -> None:
    web = Web({"/a": redirect("/b"), "/b": redirect("/a")})
    error = refused(UrlFetchFailed, web, max_redirects=5)
    assert error.numbers == {"limit": 5} and len(web.heads) == 6


def test_as_many_redirects_as_allowed() -> None:
    pages: dict[str, Page] = {"/a": redirect("/1"), "/1": redirect("/2"), "/2": redirect("/3"), "/3": page()}
    assert fetch_from(Web(pages), A, max_redirects=3) == [IMAGE]
    refused(UrlFetchFailed, Web(pages), max_redirects=2)


async def _trickle(writer: asyncio.StreamWriter, start: bytes = b"HTTP/1.1 200 OK\r\n\r\n") -> None:
    writer.write(start)
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.1)


async def _silent(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(30)


async def _endless(writer: asyncio.StreamWriter, start: bytes = b"HTTP/1.1 200 OK\r\n\r\n") -> None:
    writer.write(start)
    while True:
        writer.write(bytes(2**16))
        await writer.drain()


async def _endless_hints(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"HTTP/1.1 103 Early Hints\r\n\r\n")
        await writer.drain()
        await asyncio.sleep(0.01)


async def _slow_redirect(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(0.15)
    writer.write(redirect("/a"))


@pytest.mark.parametrize(
    "slow",
    [_trickle, partial(_trickle, start=b"HTTP/1.1 200 OK\r\nX: "), _silent, _endless_hints, _slow_redirect],
    ids=["body", "headers", "silent", "hints", "redirects"],
)
def test_slow_servers_meet_the_total_deadline(slow: Page) -> None:
    started = time.monotonic()
    error = failed(slow, timeout_s=0.5, max_redirects=50)
    assert error.numbers == {"limit_s": 0.5}
    assert time.monotonic() - started < 2


def test_a_slow_resolver_meets_the_total_deadline() -> None:
    class Slow(Web):
        async def resolve(self, host: str, port: int) -> Sequence[Address]:
            await asyncio.sleep(30)
            return []

    refused(UrlFetchFailed, Slow({}), timeout_s=0.3)


def test_all_urls_of_a_request_share_the_deadline() -> None:
    web = Web({"/a": _silent})
    started = time.monotonic()
    error = refused(UrlFetchFailed, web, *[A] * 20, timeout_s=0.5)
    assert time.monotonic() - started < 2
    assert error.param == "images[0]" and web.most_open == 8


@pytest.mark.parametrize(
    "start",
    [b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999999999999\r\n\r\n"],
)
def test_endless_bodies_meet_the_cap(start: bytes) -> None:
    taken: list[int] = []
    error = refused(BodyTooLarge, Web({"/a": partial(_endless, start=start)}), on_bytes=taken.append)
    assert error.numbers == {"limit_bytes": 10**6}
    assert sum(taken) <= 10**6


def test_endless_headers_are_given_up() -> None:
    failed(partial(_endless, start=b"HTTP/1.1 200 OK\r\nX: "))


def test_a_declared_length_over_the_cap_is_refused_unread() -> None:
    taken: list[int] = []
    refused(BodyTooLarge, Web({"/a": page(content_length=10**6 + 1)}), on_bytes=taken.append)
    assert taken == []


def test_the_cap_is_for_all_images_of_the_request() -> None:
    web = Web({"/a": page()})
    assert len(fetch_from(web, A, A, max_bytes=2 * len(IMAGE))) == 2
    refused(BodyTooLarge, web, A, A, max_bytes=2 * len(IMAGE) - 1)
    refused(BodyTooLarge, web, A, A, max_bytes=2 * len(IMAGE), inline_bytes=1)


def test_a_length_that_promises_too_much() -> None:
    failed(page(content_length=len(IMAGE) + 1))


def test_a_length_that_promises_too_little_is_kept_to() -> None:
    assert get(page(content_length=10)) == IMAGE[:10]


@pytest.mark.parametrize("length", ["x", "-1", "5, 6", "1e3"])
def test_a_length_that_is_none(length: str) -> None:
    failed(page(content_length=length))


@pytest.mark.parametrize("encoding", ["gzip", "br", "GZIP, identity", "deflate", "x"])
def test_content_encodings_are_refused(encoding: str) -> None:
    bomb = gzip.compress(bytes(10**7))
    assert "encoding" in failed(page(bomb, content_encoding=encoding)).message


def test_transfer_encodings_other_than_chunked_are_refused() -> None:
    failed(page(gzip.compress(IMAGE), content_length=None, transfer_encoding="gzip, chunked"))


@pytest.mark.parametrize("status", ["404 secret", "403 Forbidden", "500 secret", "206 Partial", "201 Created", "304 X"])
def test_other_statuses_than_200(status: str) -> None:
    error = failed(page(b"secret" if status[0] != "3" else b"", status))
    assert error.numbers == {"upstream_status": int(status[:3])}


@pytest.mark.parametrize("content", [page(b""), page(b"", "204 No Content"), page(b"", "302 Found")])
def test_no_body(content: bytes) -> None:
    failed(content)


@pytest.mark.parametrize("content", [b"", b"secret", b"HTTP/1.1", b"\x15\x03\x01\x00\x02"])
def test_what_is_not_http_says_the_same_as_a_closed_port(content: bytes) -> None:
    closed = refused(UrlFetchFailed, Web({}), "http://127.0.0.3:PORT/a")
    assert failed(content).as_dict() == closed.as_dict()


def test_the_first_bad_url_is_named_and_texts_are_checked_before_anything_is_fetched() -> None:
    web = Web({"/a": page()})
    error = refused(UrlFetchFailed, web, A, "http://images.test:PORT/404", "http://images.test:PORT/405")
    assert error.param == "images[1]"
    num_asked = len(web.heads)
    assert refused(InvalidRequest, web, A, "http://x:1/", "file:///x").param == "images[1]"
    assert len(web.heads) == num_asked


def test_the_first_error_ends_the_rest() -> None:
    web = Web({"/a": page(b"", "500 X"), "/slow": _trickle})
    started = time.monotonic()
    refused(UrlFetchFailed, web, A, "http://images.test:PORT/slow")
    assert time.monotonic() - started < 2


def test_bytes_may_be_refused_as_they_come() -> None:
    def on_bytes(num_bytes: int) -> None:
        raise Overloaded("full")

    assert refused(Overloaded, Web({"/a": page()}), on_bytes=on_bytes).param == "images[0]"


def test_proxies_of_the_environment_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        for spelling in (name, name.lower()):
            monkeypatch.setenv(spelling, f"http://{PRIVATE}:9")
    assert get(page()) == IMAGE


def test_cookies_and_user_names_go_nowhere() -> None:
    web = Web({"/a": page(b"", "302 Found", location="/b", set_cookie="secret=1"), "/b": page()})
    fetch_from(web, A)
    assert len(web.heads) == 2 and "secret" not in web.heads[1]


def test_all_requests_together_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_CONNECTIONS", 2)
    web = Web({"/a": _slow_page})
    assert fetch_from(web, *[A] * 6, max_bytes=10**7) == [IMAGE] * 6
    assert web.most_open == 2


async def _slow_page(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(0.05)
    writer.write(page())


def server_context(authority: trustme.CA, *names: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(*names).configure_cert(context)
    return context


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = httpx.create_ssl_context(trust_env=False)
    authority.configure_trust(context)
    return context


def fetch_by_tls(certified: str, url: str, *, is_trusted: bool = True, names: list[str | None] | None = None) -> bytes:
    authority = trustme.CA()
    context = server_context(authority, certified)
    context.sni_callback = lambda _, name, __: (names if names is not None else []).append(name)
    trust = trusting(authority if is_trusted else trustme.CA())
    return fetch_from(Web({"/a": page()}, tls=context), url, authority=trust, allow_http=False)[0]


def test_https_is_checked_against_the_name_and_asks_for_it() -> None:
    names: list[str | None] = []
    assert fetch_by_tls("images.test", "https://images.test:PORT/a", names=names) == IMAGE
    assert names == ["images.test"]


def test_https_by_address() -> None:
    assert fetch_by_tls(PUBLIC, f"https://{PUBLIC}:PORT/a") == IMAGE


@pytest.mark.parametrize(
    ("certified", "is_trusted"),
    [("other.test", True), (PUBLIC, True), ("images.test", False)],
    ids=["another name", "the address", "unknown authority"],
)
def test_wrong_certificates(certified: str, is_trusted: bool) -> None:
    with pytest.raises(UrlFetchFailed) as caught:
        fetch_by_tls(certified, "https://images.test:PORT/a", is_trusted=is_trusted)
    assert caught.value.as_dict() == refused(UrlFetchFailed, Web({}), "http://127.0.0.3:PORT/a").as_dict()


def test_hosts_that_share_an_address_share_no_connection() -> None:
    authority = trustme.CA()
    web = Web({"/a": page(connection="keep-alive")}, tls=server_context(authority, "images.test"))
    urls = ["https://images.test:PORT/a", "https://other.test:PORT/a"]
    assert refused(UrlFetchFailed, web, *urls, authority=trusting(authority)).param == "images[1]"


# A real service whose front-end knows one name, which it takes 127.0.0.1 for a public address of.
LOOPBACK = (
    sys.executable,
    "-c",
    """
import sys
from ipaddress import ip_address
from service import app, cli, fetch

async def resolve(host, port):
    return [ip_address("127.0.0.1" if host == "images.test" else "127.0.0.2")]

app.Fetcher = lambda rules: fetch.Fetcher(rules, resolve=resolve, is_allowed=lambda found: str(found) == "127.0.0.1")
sys.exit(cli.main())
""",
)


@contextmanager
def listening(pages: dict[str, Page]) -> Iterator[Web]:
    """A web in a thread of its own."""
    web, started, stop, loop = Web(pages), threading.Event(), asyncio.Event(), asyncio.new_event_loop()

    async def run() -> None:
        async with AsyncExitStack() as stack:
            await web.start(stack)
            started.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=[run()])
    thread.start()
    try:
        assert started.wait(10)
        yield web
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()


RGB, GRAY = ((GOLDEN / "images" / name).read_bytes() for name in ("rgb_64x48.png", "gray_70x45.png"))
FILES: dict[str, Page] = {"/rgb": page(RGB), "/gray": redirect("//images.test:PORT/moved"), "/moved": page(GRAY)}


@pytest.fixture(scope="module")
def web() -> Iterator[Web]:
    with listening({**FILES, "/slow": _trickle, "/text": page(b"secret")}) as web:
        yield web


@pytest.fixture(scope="module")
def service(web: Web) -> Iterator[RunningService]:
    urls = {"FETCH": "on", "ALLOW_HTTP": "true", "ALLOWED_PORTS": str(web.port), "TIMEOUT_S": "5"}
    environ = {
        **REFERENCE_IMAGES,
        "TPVISION_SERVER__LOG_LEVEL": "debug",
        **{f"TPVISION_URLS__{name}": value for name, value in urls.items()},
    }
    service = RunningService(["--model", str(GOLDEN / "tiny-k3-f32")], environ, LOOPBACK).wait_ready()
    yield service
    assert service.stop() == 0
    log = "".join(service.log)
    assert "images.test" not in log and "/moved" not in log and f":{web.port}" not in log and "httpcore" not in log


def embeddings(service: RunningService, route: str, **body: Any) -> Any:
    return service.client.post(f"/v1/{route}", json=body, headers={"accept": "application/json"})


def test_a_service_fetches_every_form_of_an_item(service: RunningService, web: Web) -> None:
    rgb, gray = (f"http://images.test:{web.port}/{name}" for name in ("rgb", "gray"))
    inline = [b64encode(GRAY).decode(), b64encode(RGB).decode()]
    expected = embeddings(service, "encode", images=[inline[0], inline[1], inline[0], inline[1]]).json()["images"]
    items = [gray, {"type": "image_url", "url": rgb}, inline[0], {"type": "image_url", "image_url": {"url": rgb}}]
    assert embeddings(service, "encode", images=items).json()["images"] == expected
    pooled = embeddings(service, "embeddings", input=[inline[1], inline[0]]).json()["data"]
    assert embeddings(service, "embeddings", input=[rgb, {"image": gray}]).json()["data"] == pooled


@pytest.mark.parametrize(
    ("url", "status", "code"),
    [
        ("http://private.test:PORT/secret", 400, "invalid_request"),
        ("http://images.test:22/secret", 400, "invalid_request"),
        ("file:///etc/hostname", 400, "invalid_request"),
        ("http://images.test/" + "secret" * 1000, 400, "invalid_request"),
        ("http://images.test:PORT/secret", 422, "url_fetch_failed"),
        ("http://images.test:PORT/text", 415, "unsupported_image"),
    ],
)
def test_a_service_names_the_bad_url(service: RunningService, web: Web, url: str, status: int, code: str) -> None:
    good = b64encode(RGB).decode()
    for route, key in (("encode", "images"), ("embeddings", "input")):
        answer = embeddings(service, route, **{key: [good, url.replace("PORT", str(web.port)), good]})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (status, code, f"{key}[1]")
        assert "secret" not in answer.text and "images.test" not in answer.text


def test_a_fetch_ends_when_its_client_leaves(service: RunningService, web: Web) -> None:
    url = f"http://images.test:{web.port}/slow"
    before = time.monotonic()
    with pytest.raises(httpx.ReadTimeout):
        service.client.post("/v1/encode", json={"images": [url]}, timeout=0.5)
    wait_until(lambda: web.num_open == 0, 3)
    wait_until(lambda: service.client.get("/v1/capacity").json()["in_flight"]["bytes"] == 0, 3)
    assert time.monotonic() - before < 4  # and not at the deadline


def test_a_service_fetches_nothing_by_default(tiny_k3: RunningService, web: Web) -> None:
    num_asked = len(web.heads)
    for url in (f"http://127.0.0.1:{web.port}/rgb", "https://127.0.0.1/", "file:///etc/hostname"):
        for route, key, item in (("encode", "images", url), ("embeddings", "input", {"image": url})):
            answer = embeddings(tiny_k3, route, **{key: [item]})
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_request", f"{key}[0]")
            assert error["message"].startswith("URL fetching is off")
    assert len(web.heads) == num_asked
