"""The front-end process: start -> ready -> serve -> drain -> exit, in one function.

Signal handlers set an event; `serve` acts on it. A first SIGTERM or SIGINT drains, a second one ends it now; SIGHUP
reads the settings again.
"""

import asyncio
import contextlib
import ipaddress
import logging
import os
import resource
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI

from service import signals
from service.app import create_app, create_probe_app, read_keys, set_keys
from service.engine import Engine
from service.keys import KeyRing, watch
from service.progress import LoadProgress
from service.protocol import BoundedProtocol, ConnectionTable
from service.reload import Reload, reload
from service.reporter import Reporter, Spans
from service.waiting import DaemonThread, first_of
from tp.process import reap_orphans
from tp.settings import Settings
from tp.spec import EncoderSpec

log = logging.getLogger("tpvision.server")

EXIT_OK = 0
EXIT_FAILED = 1

_FILES_PER_CONNECTION = 3  # its socket, a body, and what a JSON body's images are unpacked to
_OTHER_FILES = 512
_BACKLOG = 2048
_REAP_EVERY_S = 1.0
_READ_TIMEOUT_S = 10.0  # for the files of a reload, whose disk may hang
_FLUSH_S = 1.0  # for the last answers, when it is to end now


class ServeError(RuntimeError):
    """The service cannot start here: the port is taken, say."""


class Server(uvicorn.Server):
    """uvicorn without its signal handling, which would exit 143 after a clean drain."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to `serve`."""
        yield

    def cut_off(self) -> None:
        """Close every connection, with whatever is not sent on it yet: its request ends as when a client leaves."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()


async def serve(
    settings: Settings,
    spec: EncoderSpec,
    *,
    read_again: Callable[[], Settings] | None = None,
    on_ready: Callable[[str], Awaitable[None]] | None = None,
    stop: asyncio.Event | None = None,
) -> int:
    """Run the service until a signal, `stop`, or a failure; the exit status. `on_ready(url)` is awaited once.

    `read_again`, called in a thread after SIGHUP, gives the settings as a start would have them now, or raises what it
    would. Raises ServeError, MemoryShortError, SlabError, DecoderStartError, ControlSocketError, KeysError or
    HandoffError when it cannot start.
    """
    stop = stop or asyncio.Event()
    stop_now = asyncio.Event()
    hang_up = asyncio.Event()
    _watch_signals(stop, stop_now, hang_up if read_again else None)
    listeners = _listen(settings)
    max_connections = _allow_connections(settings.limits.max_connections)
    engine = Engine(settings, spec, on_progress=LoadProgress().update)
    spans = _export_spans(settings)
    reporter = Reporter(engine.metrics, spans)
    app = create_app(settings, engine, reporter)
    bound = listeners[0].getsockname()  # now: a reload may come when it is closed
    _warn_if_open(settings, bound)
    tables = [ConnectionTable(max_connections) for _ in listeners]
    apps = [app, create_probe_app(engine, reporter)][: len(listeners)]
    servers = [Server(_uvicorn_config(engine, app, table, reporter)) for app, table in zip(apps, tables, strict=True)]

    def take_over(settings: Settings, keys: KeyRing | None) -> None:
        engine.take_over(settings)
        set_keys(app, keys)
        max_connections = _allow_connections(settings.limits.max_connections)
        for table in tables:
            table.max_connections = max_connections
        _warn_if_open(settings, bound)

    if not await _start(engine, stop):
        signals.ignore()
        return EXIT_FAILED if stop_now.is_set() else EXIT_OK
    pairs = zip(servers, listeners, strict=True)
    serving = [asyncio.create_task(server.serve(sockets=[listener])) for server, listener in pairs]
    beside = [
        asyncio.create_task(_announce(engine, [_url(settings, listener) for listener in listeners], on_ready)),
        asyncio.create_task(_watch(app, engine)),
    ]
    if read_again is not None:
        beside.append(asyncio.create_task(_follow(hang_up, read_again, engine, take_over)))
    for task in beside:
        task.add_done_callback(lambda task: stop.set() if not task.cancelled() and task.exception() else None)
    flush_until = time.monotonic()
    try:
        await first_of(stop.wait(), asyncio.shield(engine.failure), *map(asyncio.shield, serving))
        flush_until = time.monotonic() + engine.settings.limits.drain_timeout_s
        if stop.is_set():
            log.info("draining: nothing new is taken, accepted requests finish")
            await first_of(engine.drain(), stop_now.wait(), asyncio.shield(engine.failure))
    finally:
        await _end(engine, servers, serving, stop_now, flush_until=flush_until)
        if spans is not None:
            await asyncio.to_thread(spans.stop)
        for task in beside:
            task.cancel()
        ends = await asyncio.gather(*beside, return_exceptions=True)
    for end in ends:
        if isinstance(end, Exception):
            raise end
    signals.ignore()
    if engine.failure.done():
        log.error("the service failed: %s", engine.failure.result())
    return EXIT_FAILED if engine.failure.done() or stop_now.is_set() else EXIT_OK


async def _start(engine: Engine, stop: asyncio.Event) -> bool:
    """Whether it has started; not where `stop` came first, with nothing to drain. Raises what `Engine.start` does."""
    starting = asyncio.create_task(engine.start())
    await first_of(asyncio.shield(starting), stop.wait())
    if starting.done():
        starting.result()
        return True
    starting.cancel()
    await asyncio.wait([starting])
    return False


async def _end(
    engine: Engine,
    servers: list[Server],
    serving: list[asyncio.Task[None]],
    stop_now: asyncio.Event,
    *,
    flush_until: float,
) -> None:
    """Answer what is left, let the answers out until then, and stop the engine; all of it at once on `stop_now`."""
    await engine.abandon()
    for server in servers:
        server.should_exit = True
    served = asyncio.gather(*serving)
    left_s = max(0.0, flush_until - time.monotonic())
    await first_of(asyncio.shield(served), asyncio.sleep(left_s), stop_now.wait())
    await first_of(asyncio.shield(served), asyncio.sleep(_FLUSH_S))
    for server in servers:
        server.cut_off()
    await engine.stop(stop_now)
    await served


async def _follow(
    hang_up: asyncio.Event,
    read_again: Callable[[], Settings],
    engine: Engine,
    take_over: Callable[[Settings, KeyRing | None], None],
) -> None:
    """Whenever SIGHUP asks for it, take over what a running service can of new settings, all of it at one moment."""

    def read() -> tuple[Reload, KeyRing | None]:
        found = reload(engine.started_with, engine.settings, read_again())
        return found, read_keys(found.settings)

    thread = DaemonThread(_READ_TIMEOUT_S)
    while True:
        await hang_up.wait()
        hang_up.clear()
        try:
            found, keys = await thread.run(read)
        except Exception as error:  # noqa: BLE001 - whatever an operator's files hold, the service goes on
            log.error("the settings were not reloaded, nothing has changed: %s", error)
            continue
        take_over(found.settings, keys)
        for sentence in found.held_back:
            log.warning("not reloaded: %s", sentence)
        log.info("settings reloaded: %s", ", ".join(found.changed) or "nothing has changed")


async def _watch(app: FastAPI, engine: Engine) -> None:
    """What goes on beside serving: new keys, and as PID 1 the dead that nobody else collects."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(watch(lambda: app.state.keys))
        if os.getpid() == 1:
            tasks.create_task(_reap(engine))


async def _reap(engine: Engine) -> None:
    while True:
        await asyncio.sleep(_REAP_EVERY_S)
        reap_orphans(engine.child_pids)


async def _announce(engine: Engine, urls: list[str], on_ready: Callable[[str], Awaitable[None]] | None) -> None:
    await engine.ready.wait()
    url, *probe_urls = urls
    for probe_url in probe_urls:
        log.info("probes at %s", probe_url)
    settings = engine.settings
    log.info(
        "ready at %s: %s in %s, tensor parallel %d x %d group(s), tiers %s, policy %s",
        url,
        engine.model_name,
        engine.dtype,
        settings.parallel.tensor,
        settings.parallel.groups,
        ",".join(map(str, settings.capacity.patch_capacities)),
        settings.capacity.policy,
    )
    if on_ready is not None:
        await on_ready(url)


def _export_spans(settings: Settings) -> Spans | None:
    """Where spans go. Raises ServeError without the extra that exports them."""
    if settings.server.traces == "off":
        return None
    try:
        from service.telemetry import SpanExport  # noqa: PLC0415 - an extra, which nothing else needs
    except ModuleNotFoundError as error:
        raise ServeError(f"server.traces needs the package {error.name}: pip install 'tpvision[otel]'") from error
    return SpanExport.to_otlp()


def _uvicorn_config(engine: Engine, app: FastAPI, table: ConnectionTable, reporter: Reporter) -> uvicorn.Config:
    protocol: Any = partial(
        BoundedProtocol,
        limits=lambda: engine.settings.limits,
        table=table,
        on_refused=reporter.refuse,
    )
    return uvicorn.Config(
        app,
        loop="uvloop",
        http=protocol,
        ws="none",
        lifespan="off",
        workers=1,  # else the environment's WEB_CONCURRENCY is read
        log_config=None,
        access_log=False,
        server_header=False,
    )


def _watch_signals(stop: asyncio.Event, stop_now: asyncio.Event, hang_up: asyncio.Event | None) -> None:
    def on_signal() -> None:
        (stop_now if stop.is_set() else stop).set()

    actions: dict[signal.Signals, Callable[[], object]] = {signal.SIGTERM: on_signal, signal.SIGINT: on_signal}
    if hang_up is not None:
        actions[signal.SIGHUP] = hang_up.set
    elif signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as `nohup` has it
        actions[signal.SIGHUP] = on_signal
    signals.watch(actions)


def _listen(settings: Settings) -> list[socket.socket]:
    """The service's listener, and the probes' own where there is one."""
    server = settings.server
    ports = [server.port] if server.probe_port is None else [server.port, server.probe_port]
    return [_bind(server.host, port) for port in ports]


def _warn_if_open(settings: Settings, bound: Any) -> None:
    address, port, *_ = bound
    if settings.server.api_keys_file is None and not ipaddress.ip_address(address).is_loopback:
        log.warning(
            "ANYONE who reaches %s port %d may use this service: server.api_keys_file is not set",
            *(settings.server.host, port),
        )


def _bind(host: str, port: int) -> socket.socket:
    with contextlib.ExitStack() as undo:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listener = undo.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)  # now, not when uvicorn does: two services could bind the same port
        except (OSError, UnicodeError) as error:  # a label of over 63 characters
            reason = error.strerror if isinstance(error, OSError) else "not a host name"
            raise ServeError(f"cannot listen on {host} port {port}: {reason}") from error
        listener.setblocking(False)
        undo.pop_all()
        return listener


def _url(settings: Settings, listener: socket.socket) -> str:
    host = settings.server.host
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


def _allow_connections(wanted: int) -> int:
    """Raise this process's limit of open files, which is often 1,024, as far as needed and allowed.

    How many connections it then has room for, at most as many as wanted.
    """
    needed = _FILES_PER_CONNECTION * wanted + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed == needed:
        return wanted
    room = max(1, allowed // (2 * _FILES_PER_CONNECTION))  # as many again may be idle, and the rest takes its share
    log.warning(
        "limits.max_connections may need %d open files, but only %d are allowed: at most %d", needed, allowed, room
    )
    return min(wanted, room)
