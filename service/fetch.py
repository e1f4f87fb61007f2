"""Images given as URLs: each fetched into a memory file, or refused. Off unless the operator turns it on.

Every hop is checked anew (`service.addresses`): its URL, and all addresses that its host has. The address that was
checked is the one connected to, so a name that changes its address meanwhile gains nothing; TLS is checked against the
name. There are no proxies, cookies, credentials or shared connections. Messages tell neither addresses nor how a
connection failed, so that a client learns nothing of the network here. `service.routes` calls this.
"""

import asyncio
import os
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from ipaddress import ip_address

import httpx

from service.addresses import Address, Target, check_url, follow, is_public
from service.body import Body, ImageBytes
from service.errors import BodyTooLarge, InvalidRequest, ServiceError, UrlFetchFailed
from tp.settings import UrlSettings

Resolver = Callable[[str, int], Awaitable[Sequence[Address]]]

_MAX_AT_ONCE = 8  # of one request
_MAX_CONNECTIONS = 100  # of all requests together
_MAX_LOOKUPS = 100  # of all requests together, with those that have ended
_MAX_TRIED = 4  # addresses of one host; all of them are checked
_REDIRECTS = (301, 302, 303, 307, 308)
_HEADERS = {"Accept": "image/*", "Accept-Encoding": "identity", "Connection": "close", "User-Agent": "tpvision"}


class SystemResolver:
    """The system's resolver, which cannot be told to stop: each lookup keeps its place until it really ends.

    In daemon threads, so that a slow name server holds up neither the other names nor the end of the process.
    """

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(_MAX_LOOKUPS)

    async def __call__(self, host: str, port: int) -> list[Address]:
        """All addresses of a host, in the order in which to try them. Raises OSError when it has none."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[Address]] = loop.create_future()

        def settle(found: list[Address] | Exception) -> None:
            self._places.release()
            if answer.done():
                return  # whoever asked has left
            if isinstance(found, Exception):
                answer.set_exception(found)
            else:
                answer.set_result(found)

        def look_up() -> None:
            found = _addresses(host, port)
            with suppress(RuntimeError):  # the loop is closed: the process ends
                loop.call_soon_threadsafe(settle, found)

        await self._places.acquire()
        try:
            threading.Thread(target=look_up, name="name lookup", daemon=True).start()
        except RuntimeError as error:  # no more threads are allowed
            self._places.release()
            raise OSError("no thread for a name lookup") from error
        return await answer


def _addresses(host: str, port: int) -> list[Address] | Exception:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return error
    return list(dict.fromkeys(ip_address(address[0]) for *_, address in found))


class Fetcher:
    """Fetches what the settings allow. One per process; tests give it their own names, addresses and authorities."""

    def __init__(
        self,
        rules: UrlSettings,
        *,
        resolve: Resolver | None = None,
        is_allowed: Callable[[Address], bool] = is_public,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._rules = rules
        self._resolve = resolve or SystemResolver()
        self._is_allowed = is_allowed
        self._tls = tls or httpx.create_ssl_context(trust_env=False)
        self._connections = asyncio.Semaphore(_MAX_CONNECTIONS)

    async def fetch(
        self,
        urls: Mapping[str, str],
        body: Body,
        *,
        max_bytes: int,
        inline_bytes: int,
        on_bytes: Callable[[int], None],
    ) -> list[ImageBytes]:
        """The images of one request into a body, all or nothing; `urls` go by what error.param calls them.

        `max_bytes` holds for all of them together, and for the `inline_bytes` of images that came with the request;
        `on_bytes` hears of each chunk's size before it is kept, and may refuse it with a ServiceError. Raises that,
        InvalidRequest (a URL, host or address that is not fetched from), UrlFetchFailed or BodyTooLarge, for the first
        bad URL in order.
        """
        targets = []
        for param, url in urls.items():
            with _naming(param):
                targets.append(check_url(url, self._rules))
        budget = _Budget(max_bytes, inline_bytes, on_bytes)
        at_once = asyncio.Semaphore(_MAX_AT_ONCE)
        deadline = asyncio.get_running_loop().time() + self._rules.timeout_s
        # Each image has room for all bytes: a memory file takes up only what is written.
        places = [_Place(body.fd, index * max_bytes) for index in range(len(targets))]
        tasks = [
            asyncio.create_task(self._fetch_by(deadline, at_once, target, place, budget))
            for target, place in zip(targets, places, strict=True)
        ]
        try:
            for param, task in zip(urls, tasks, strict=True):
                with _naming(param):
                    await task
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [place.image for place in places]

    async def _fetch_by(
        self, deadline: float, at_once: asyncio.Semaphore, target: Target, place: "_Place", budget: "_Budget"
    ) -> None:
        try:
            async with asyncio.timeout_at(deadline), at_once, self._connections:
                await self._fetch(target, place, budget)
        except TimeoutError:
            limit_s = self._rules.timeout_s
            raise UrlFetchFailed(
                f"the request's URLs were not fetched within {limit_s:g} s", numbers={"limit_s": limit_s}
            ) from None

    async def _fetch(self, target: Target, place: "_Place", budget: "_Budget") -> None:
        for _ in range(self._rules.max_redirects + 1):
            async with self._get(target) as response:
                location = response.headers.get("location") if response.status_code in _REDIRECTS else None
                if location is None:
                    await _keep(response, place, budget)
                    return
            target = follow(target, location, self._rules)
        limit = self._rules.max_redirects
        raise UrlFetchFailed(f"the URL redirects more than {limit} times", numbers={"limit": limit})

    @asynccontextmanager
    async def _get(self, target: Target) -> AsyncIterator[httpx.Response]:
        """The answer to one hop, whose connection ends with the block: none is ever used for another host."""
        addresses = await self._addresses_of(target)
        async with httpx.AsyncHTTPTransport(verify=self._tls, trust_env=False) as transport:
            response = await self._request(transport, target, addresses[:_MAX_TRIED])
            try:
                yield response
            finally:
                await response.aclose()

    async def _addresses_of(self, target: Target) -> Sequence[Address]:
        """Addresses that may be connected to. One error whatever is wrong with them, or if there are none."""
        found: Sequence[Address] = ()
        if target.literal is not None:
            found = [target.literal]
        else:
            with suppress(OSError, UnicodeError):
                found = await self._resolve(target.host, target.port)
        if not found or not all(self._is_allowed(address) for address in found):
            raise InvalidRequest(
                "the URL's host does not lead to public addresses alone, so nothing is fetched from it"
            )
        return found

    async def _request(
        self, transport: httpx.AsyncHTTPTransport, target: Target, addresses: Sequence[Address]
    ) -> httpx.Response:
        """The answer of the first address that can be connected to."""
        connect_s = self._rules.timeout_s / len(addresses)
        for address in addresses:
            request = httpx.Request(
                "GET",
                target.at(address),
                headers={"Host": target.host_header, **_HEADERS},
                extensions={"sni_hostname": target.host, "timeout": {"connect": connect_s}},
            )
            try:
                return await transport.handle_async_request(request)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                continue
            except (httpx.HTTPError, OSError):
                break
        raise _unreachable()


async def _keep(response: httpx.Response, place: "_Place", budget: "_Budget") -> None:
    """The answer's body, as sent. Raises UrlFetchFailed unless it is all of a file."""
    if response.status_code != httpx.codes.OK:
        raise UrlFetchFailed(
            f"the URL's server answered with status {response.status_code}",
            numbers={"upstream_status": response.status_code},
        )
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        raise UrlFetchFailed("the URL's server answered in a content encoding that was not asked for")
    budget.check(_declared_bytes(response))
    async for chunk in _chunks(response):
        budget.take(len(chunk))
        place.append(chunk)
    if place.num_bytes == 0:
        raise UrlFetchFailed("the URL's server answered without a single byte")


async def _chunks(response: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for chunk in response.aiter_raw():
            yield chunk
    except (httpx.HTTPError, OSError):
        raise _unreachable() from None


def _declared_bytes(response: httpx.Response) -> int:
    length = response.headers.get("content-length", "")
    return int(length) if length.isdecimal() and len(length) < 20 else 0


def _unreachable() -> UrlFetchFailed:
    return UrlFetchFailed("the URL could not be fetched: its server cannot be reached, or does not answer as it should")


class _Place:
    """Where one image grows in a memory file."""

    def __init__(self, fd: int, offset: int) -> None:
        self._fd = fd
        self._offset = offset
        self.num_bytes = 0

    @property
    def image(self) -> ImageBytes:
        return ImageBytes(self._fd, self._offset, self.num_bytes)

    def append(self, chunk: bytes) -> None:
        self.num_bytes += os.pwrite(self._fd, chunk, self._offset + self.num_bytes)


class _Budget:
    """The bytes that the images of one request may still take, whichever of them they come for."""

    def __init__(self, max_bytes: int, inline_bytes: int, on_bytes: Callable[[int], None]) -> None:
        self._max_bytes = max_bytes
        self._left = max_bytes - inline_bytes
        self._on_bytes = on_bytes

    def check(self, num_bytes: int) -> None:
        if num_bytes > self._left:
            raise BodyTooLarge(
                f"the request's images have more than {self._max_bytes} bytes",
                numbers={"limit_bytes": self._max_bytes},
            )

    def take(self, num_bytes: int) -> None:
        self.check(num_bytes)
        self._on_bytes(num_bytes)
        self._left -= num_bytes


@contextmanager
def _naming(param: str) -> Iterator[None]:
    try:
        yield
    except ServiceError as error:
        raise error.with_param(param) from None
