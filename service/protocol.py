"""HTTP connections that nobody can hold for nothing: uvicorn's protocol with a deadline or a bound for each state.

    idle        no byte of a request       closed after limits.keep_alive_timeout_s, a new one after header_timeout_s
    head        request line and headers   408 after header_timeout_s, 431 over max_header_bytes, 400 where malformed
                                           or without the one Host header that HTTP/1.1 has
    request     body and answer            the application's own deadlines
    sending     an answer not read         cut off after send_timeout_s, so that the bytes it holds are free again
    answered    before the request's end   the rest is thrown away, for header_timeout_s at most
    half-closed no more from the client    closed after the answer, or as soon as it proves to have left altogether

An end-of-file may come from a client that has left, or from one that has said all and waits. They differ in what their
kernel makes of another byte: it answers with a reset for one that has left. So an interim `100 Continue`, which
HTTP/1.1 clients skip, is sent where nothing of the answer has been.

What is refused here gets the same error object as everywhere, and one short line in the log, never its own bytes.
`service.server` makes one `ConnectionTable` and passes both to uvicorn, which makes one protocol for each connection.
"""

import asyncio
import fcntl
import logging
import re
import socket
import struct
import termios
import time
from collections.abc import Callable
from typing import Any, NoReturn

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from service.errors import HeadersTooLarge, InvalidRequest, Overloaded, RequestTimeout, ServiceError
from service.record import RequestRecord
from tp.settings import LimitSettings

log = logging.getLogger("tpvision.http")

PROBES = ("/livez", "/readyz", "/health", "/metrics")  # whoever watches the service; always answered, never logged

_PROBE_URLS = frozenset(path.encode() for path in PROBES)
_MAX_HEADERS = 128  # a header costs us far more than the four bytes that `a:` and its line end take
_MAX_PIPELINED = 16  # requests parsed behind the one in progress
_PARSED_BYTES = 16 * 2**10  # at a time, between two looks at the bounds
_FREE_CHUNKS = 1000  # of one body, whatever they hold;
_MIN_CHUNK_BYTES = 32  # of more than those, on average: a chunk of a single byte costs as much
_RESERVED = 128  # connections beyond the limit, for probes to come in when all others are busy
_LINGER_S = 2.0  # a refused client may read its answer for so long; closing at once would reset the connection
_MIN_READ_BYTES = 64 * 2**10  # within send_timeout_s; a client that takes less does not read
_HOST = re.compile(rb"(?:\[[0-9A-Za-z:.%~_-]+\]|[\w.~!$&'()*+,;=%-]*)(?::[0-9]*)?")  # RFC 3986, and `_` in names
_INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
_TCP_CLOSE = 7  # the kernel's number of the state after a reset: net/tcp_states.h
_FIRST_LOOK_S, _LATER_LOOK_S = 0.05, 1.0  # whether a client has left that sends no more; twice as long every time
_RETRY_S = 1.0
_FULL_LOG_S = 10.0


class ConnectionTable:
    """The open connections of one listener: who waits for a request, longest first, and who is busy with one."""

    def __init__(self, max_connections: int) -> None:
        """`max_connections` may be changed; where it shrinks, idle ones are closed as others come."""
        self.max_connections = max_connections
        self._waiting: dict[BoundedProtocol, None] = {}
        self._busy: set[BoundedProtocol] = set()
        self._next_log = 0.0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._busy)

    def has_room(self, connection: "BoundedProtocol") -> bool:
        """Whether this one may start a request beside those in progress."""
        return connection in self._busy or len(self._busy) < self.max_connections

    def admit(self, connection: "BoundedProtocol") -> None:
        """Take a new connection in, where there is no place left in that of the longest waiting."""
        reserved = min(_RESERVED, self.max_connections)
        while len(self._waiting) >= max(reserved, self.max_connections - len(self._busy)):
            self._log_full()
            longest = next(iter(self._waiting))
            self.remove(longest)
            longest.transport.abort()
        self._waiting[connection] = None

    def mark_busy(self, connection: "BoundedProtocol") -> None:
        """It has a request in progress, or an answer that is not read."""
        self._waiting.pop(connection, None)
        self._busy.add(connection)

    def mark_waiting(self, connection: "BoundedProtocol") -> None:
        """It may be closed to make room; it goes last in that order."""
        if connection in self._busy:
            self._busy.remove(connection)
            self._waiting[connection] = None

    def remove(self, connection: "BoundedProtocol") -> None:
        """It is closed. Idempotent."""
        self._waiting.pop(connection, None)
        self._busy.discard(connection)

    def _log_full(self) -> None:
        now = time.monotonic()
        if now >= self._next_log:
            self._next_log = now + _FULL_LOG_S
            log.warning("%d connections are open, %d of them busy: idle ones are closed", len(self), len(self._busy))


class BoundedProtocol(HttpToolsProtocol):
    """One connection. Its timer belongs to its state, see above; a second one watches what is not sent yet."""

    def __init__(
        self,
        *arguments: Any,
        limits: Callable[[], LimitSettings],
        table: ConnectionTable,
        on_refused: Callable[[ServiceError], str],
        **options: Any,
    ) -> None:
        """`limits` gives those in force, which a connection takes over whenever it is idle.

        `on_refused` is told of what is refused before it is a request, and gives the id for its answer.
        """
        self._pieces: list[bytes] = []  # of a body, parsed and not yet passed on
        self.on_body = self._pieces.append  # type: ignore[method-assign, assignment]  # no frame of ours for each
        super().__init__(*arguments, **options)
        self._current_limits = limits
        self._limits = limits()
        self._table = table
        self._on_refused = on_refused
        self._timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        self._left_timer: asyncio.TimerHandle | None = None  # runs once the client sends no more
        self._active: RequestResponseCycle | None = None  # uvicorn's `cycle` is the newest, in a pipeline another one
        self._in_message = False
        self._in_head = False
        self._head_bytes = 0  # of request line, headers and trailers, as parsed
        self._unparsed_bytes = 0  # received since the parser last told of something
        self._num_chunks = 0  # of a body, beyond one for each time that it was parsed
        self._num_body_bytes = 0
        self._num_unsent = 0
        self._fault: ServiceError | None = None  # what a callback raised; the parser only says that one did
        self._is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connected."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # so that writing is paused exactly while something is not sent
        self._table.admit(self)
        self._arm(self._limits.header_timeout_s, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone; whoever works on a request of it learns so."""
        self._table.remove(self)
        self._disarm()
        self._stop_watching()
        if self._left_timer is not None:
            self._left_timer.cancel()
        if self._is_answering and not self._is_refused and (record := self._record) is not None:
            record.client_gone = True
        self._abandon()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more; whether it may still wait for an answer, and the connection stays open for it.

        What is not whole after the requests that are is dropped. HTTP/1.0 has no interim answers to find out by whether
        the client waits, so there who sends no more has left.
        """
        if self.transport.is_closing() or self._active is None or not self._is_answering:
            return False
        if self._active.more_body or self._active.scope["http_version"] == "1.0":
            return False
        if self._left_timer is None:  # told again whenever reading goes on
            if self.pipeline and self.pipeline[0][0].more_body:
                self.pipeline.popleft()
            last = self.pipeline[0][0] if self.pipeline else self._active
            last.keep_alive = False
            if not self._active.response_started:
                self.transport.write(_INTERIM)
            self._look_whether_left(_FIRST_LOOK_S)
        return True

    def data_received(self, data: bytes) -> None:
        """Parse what came, unless it was refused before."""
        if self._is_deaf:
            return
        if self._is_idle and self._active is not None:  # a new connection's deadline runs since it was made
            self._limits = self._current_limits()
            self._arm(self._limits.header_timeout_s, self._head_is_late)
        view = memoryview(data)
        for start in range(0, len(data), _PARSED_BYTES):
            if not self._is_deaf:
                self._parse(view[start : start + _PARSED_BYTES])

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        self._in_message = self._in_head = True
        self._head_bytes = self._num_chunks = self._num_body_bytes = 0
        super().on_message_begin()
        self.scope["state"]["started"] = time.monotonic()

    def on_url(self, url: bytes) -> None:
        """A piece of the request line."""
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header, or one trailer."""
        self._count_head(len(name) + len(value))
        super().on_header(name, value)
        if len(self.headers) > _MAX_HEADERS:
            self._stop_parsing(HeadersTooLarge(f"more than {_MAX_HEADERS} headers", numbers={"limit": _MAX_HEADERS}))

    def on_headers_complete(self) -> None:
        """The head is complete: the application starts, unless there is no room for another request."""
        self._unparsed_bytes = 0
        self._in_head = False
        if self.parser.should_upgrade():
            return  # see `_decline_upgrade`
        self._disarm()
        self._check_host()
        if not self._table.has_room(self) and self.url.partition(b"?")[0] not in _PROBE_URLS:
            limit = self._table.max_connections
            self._stop_parsing(
                Overloaded(f"{limit} connections are busy", numbers={"limit": limit}, retry_after_s=_RETRY_S)
            )
        if len(self.pipeline) >= _MAX_PIPELINED:
            self._stop_parsing(InvalidRequest(f"over {_MAX_PIPELINED} requests sent before the first was answered"))
        super().on_headers_complete()
        self._table.mark_busy(self)

    def on_message_complete(self) -> None:
        """The last byte of a request."""
        if self.parser.should_upgrade():
            return
        self._pass_on()
        self._unparsed_bytes = 0
        self._in_message = False
        super().on_message_complete()
        if self._active is not None and self._active.response_complete:  # it was answered before
            self._await_next()

    def on_response_complete(self) -> None:
        """The last byte of an answer is with the kernel, or on its way there."""
        super().on_response_complete()
        self._unset_keepalive_if_required()  # our own timer takes its place
        self._await_next()

    def pause_writing(self) -> None:
        """Something is not sent, because the client does not read it."""
        super().pause_writing()
        self._num_unsent = self._count_unsent()
        self._send_timer = self.loop.call_later(self._limits.send_timeout_s, self._check_sending)

    def resume_writing(self) -> None:
        """All is sent."""
        super().resume_writing()
        self._stop_watching()
        if not self._is_answering:
            self._table.mark_waiting(self)

    def _parse(self, data: "bytes | memoryview") -> None:
        self._unparsed_bytes += len(data)
        try:
            self.parser.feed_data(data)
            self._pass_on()
        except httptools.HttpParserUpgrade as upgrade:
            self._decline_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._refuse(self._fault or InvalidRequest("the request is not valid HTTP/1.1"))
        else:
            if self._unparsed_bytes > self._limits.max_header_bytes:
                self._refuse(self._too_large())
            elif self._num_chunks > _FREE_CHUNKS + self._num_body_bytes // _MIN_CHUNK_BYTES:
                self._refuse(InvalidRequest(f"a body in chunks of less than {_MIN_CHUNK_BYTES} bytes on average"))

    def _pass_on(self) -> None:
        """Give the pieces of the body that were parsed to the request that they belong to."""
        if not self._pieces:
            return
        body = b"".join(self._pieces)
        self._num_chunks += len(self._pieces) - 1
        self._num_body_bytes += len(body)
        self._pieces.clear()
        self._unparsed_bytes = 0
        super().on_body(body)

    def _decline_upgrade(self, rest: "bytes | memoryview") -> None:
        """Stay with HTTP/1.1, as a server may. The parser will not: another one gets the head without the wish."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse(InvalidRequest("this is no proxy"))
            return
        lines = [method + b" " + self.url + b" HTTP/" + self.parser.get_http_version().encode()]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self._parse(b"\r\n".join([*lines, b"", b""]))
        if not self._is_deaf:
            self._parse(rest)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._active = cycle
        super()._start_asgi_task(cycle, app)

    @property
    def _is_deaf(self) -> bool:
        """Whether what comes now is thrown away."""
        return self._is_refused or self.transport.is_closing()

    @property
    def _is_answering(self) -> bool:
        return self._active is not None and not self._active.response_complete

    @property
    def _record(self) -> RequestRecord | None:
        """Of the request that is answered, or was last, once the application has seen it."""
        return None if self._active is None else self._active.scope["state"].get("record")

    @property
    def _is_idle(self) -> bool:
        return not self._is_answering and not self._in_message and self._unparsed_bytes == 0

    def _await_next(self) -> None:
        """After an answer: what the connection waits for now, and how long."""
        if self._is_answering or self.transport.is_closing():
            return  # with the next request of a pipeline; or until the last bytes are sent
        if self._in_message:  # the rest of the body that was answered, or a head that is not complete
            self._arm(self._limits.header_timeout_s, self._head_is_late)
        else:
            self._arm(self._limits.keep_alive_timeout_s, self.transport.close)
        if not self.flow.write_paused:
            self._table.mark_waiting(self)

    def _head_is_late(self) -> None:
        limit_s = self._limits.header_timeout_s
        if self._is_idle or (self._in_message and not self._in_head):
            self.transport.close()
        else:
            message = f"the headers were not complete after {limit_s:g} s"
            self._refuse(RequestTimeout(message, numbers={"limit_s": limit_s}))

    def _count_head(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > self._limits.max_header_bytes:
            self._stop_parsing(self._too_large())

    def _check_host(self) -> None:
        """RFC 9112, section 3.2: one in HTTP/1.1, none or one before it. It may be empty."""
        values = [value.rstrip(b" \t") for name, value in self.headers if name == b"host"]
        if not values and self.parser.get_http_version() == "1.1":
            self._stop_parsing(InvalidRequest("a request without a Host header"))
        if len(values) > 1:
            self._stop_parsing(InvalidRequest(f"{len(values)} Host headers", numbers={"num_headers": len(values)}))
        if not all(map(_HOST.fullmatch, values)):
            self._stop_parsing(InvalidRequest("a Host header that names no host"))

    def _stop_parsing(self, error: ServiceError) -> NoReturn:
        """From a callback of the parser."""
        self._fault = error
        raise error

    def _too_large(self) -> ServiceError:
        limit = self._limits.max_header_bytes
        return HeadersTooLarge(f"request line and headers have more than {limit} bytes", numbers={"limit_bytes": limit})

    def _refuse(self, error: ServiceError) -> None:
        """Answer without the application, and close as soon as the client has had time to read it."""
        self._is_refused = True
        self.pipeline.clear()
        self.flow.resume_reading()  # unread input would turn our closing into a reset
        if self._is_answering and not self._can_still_refuse():
            assert self._active is not None
            self._active.keep_alive = False  # an earlier request's answer goes first, and is the last
            return
        request_id = self._note_refusal(error)
        self._abandon()
        self.transport.write(self._refusal_bytes(error, request_id))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._arm(_LINGER_S, self.transport.close)
        self._table.mark_waiting(self)

    def _note_refusal(self, error: ServiceError) -> str:
        """Tell of it once, here or in the record of the request in progress; the id for the answer."""
        if self._active is not None and self._is_answering:
            if self._record is not None:
                self._record.note_error(error)
                return self._record.request_id
            self._active.scope["state"]["refused"] = True  # before the application has seen it, which it need not
        return self._on_refused(error)

    def _can_still_refuse(self) -> bool:
        """Whether it is the body of the request in progress that is at fault, and its answer has not begun."""
        return (
            self._active is not None
            and self._active is self.cycle
            and self._active.more_body
            and not self._active.response_started
        )

    def _refusal_bytes(self, error: ServiceError, request_id: str) -> bytes:
        body = error.as_json()
        headers = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"x-request-id", request_id.encode()),
            (b"connection", b"close"),
        ]
        if error.retry_after_s is not None:
            headers.append((b"retry-after", str(round(error.retry_after_s)).encode()))
        lines = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
        return STATUS_LINE[error.status] + lines + b"\r\n" + body

    def _abandon(self) -> None:
        """Whoever works on the request in progress learns that its client is gone."""
        if self._active is not None and self._is_answering:
            self._active.disconnected = True
            self._active.message_event.set()

    def _look_whether_left(self, next_s: float) -> None:
        connection = self.transport.get_extra_info("socket")
        if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE:
            self.transport.abort()
        else:
            again_s = min(2 * next_s, _LATER_LOOK_S)
            self._left_timer = self.loop.call_later(next_s, self._look_whether_left, again_s)

    def _check_sending(self) -> None:
        left = self._count_unsent()
        if self._num_unsent - left < _MIN_READ_BYTES:
            request_id = "-" if self._record is None else self._record.request_id
            log.info("closed: an answer was not read for %g s id=%s", self._limits.send_timeout_s, request_id)
            self.transport.abort()
        else:
            self._num_unsent = left
            self._send_timer = self.loop.call_later(self._limits.send_timeout_s, self._check_sending)

    def _count_unsent(self) -> int:
        """Bytes that the client has not acknowledged: ours, and the kernel's, which move in much larger steps."""
        connection = self.transport.get_extra_info("socket")
        in_kernel = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, struct.pack("i", 0))
        return self.transport.get_write_buffer_size() + int(struct.unpack("i", in_kernel)[0])

    def _arm(self, seconds: float, action: Callable[[], None]) -> None:
        self._disarm()
        self._timer = self.loop.call_later(seconds, action)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _stop_watching(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None
