"""The front-end process: start -> ready -> serve -> drain -> exit, in one function.

Signal handlers set an event; `serve` acts on it. A first SIGTERM or SIGINT drains, a second one ends it now.
"""

import asyncio
import contextlib
import ipaddress
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator

import uvicorn

from service.app import create_app
from service.engine import Engine
from service.progress import LoadProgress
from tp.settings import Settings
from tp.spec import EncoderSpec

log = logging.getLogger("tpvision.server")

EXIT_OK = 0
EXIT_FAILED = 1


class ServeError(RuntimeError):
    """The service cannot start here: the port is taken, say."""


class Server(uvicorn.Server):
    """uvicorn without its signal handling, which would exit 143 after a clean drain."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to `serve`."""
        yield


async def serve(
    settings: Settings,
    spec: EncoderSpec,
    *,
    on_ready: Callable[[str], Awaitable[None]] | None = None,
    stop: asyncio.Event | None = None,
) -> int:
    """Run the service until a signal, `stop`, or a failure; the exit status. `on_ready(url)` is awaited once.

    Raises ServeError, SlabError, SocketInUseError or KeysError when it cannot start.
    """
    stop = stop or asyncio.Event()
    stop_now = asyncio.Event()
    _watch_signals(stop, stop_now)
    listener = _bind(settings)
    url = f"http://{settings.server.host}:{listener.getsockname()[1]}"
    engine = Engine(settings, spec, on_progress=LoadProgress().update)
    app = create_app(settings, engine)
    server = Server(_uvicorn_config(settings, app))
    await engine.start()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    ready = asyncio.create_task(_announce(engine, url, on_ready))
    ready.add_done_callback(lambda task: stop.set() if not task.cancelled() and task.exception() else None)
    try:
        await _first_event(stop.wait(), asyncio.shield(engine.failure), asyncio.shield(serving))
        if stop.is_set():
            log.info("draining: nothing new is taken, accepted requests finish")
            await _first_event(engine.drain(), stop_now.wait(), asyncio.shield(engine.failure))
    finally:
        ready.cancel()
        failure = (await asyncio.gather(ready, return_exceptions=True))[0]
        server.should_exit = True
        server.force_exit = stop_now.is_set()
        await serving
        await engine.stop(now=stop_now.is_set())
    if isinstance(failure, Exception):
        raise failure
    if engine.failure.done():
        log.error("the service failed: %s", engine.failure.result())
        return EXIT_FAILED
    return EXIT_FAILED if stop_now.is_set() else EXIT_OK


async def _announce(engine: Engine, url: str, on_ready: Callable[[str], Awaitable[None]] | None) -> None:
    await engine.ready.wait()
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


def _uvicorn_config(settings: Settings, app: object) -> uvicorn.Config:
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        loop="uvloop",
        http="httptools",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(settings.limits.drain_timeout_s)),
    )


def _watch_signals(stop: asyncio.Event, stop_now: asyncio.Event) -> None:
    def on_signal() -> None:
        (stop_now if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)


def _bind(settings: Settings) -> socket.socket:
    host, port = settings.server.host, settings.server.port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.setblocking(False)
    except OSError as error:
        raise ServeError(f"cannot listen on {host} port {port}: {error.strerror}") from error
    if settings.server.api_keys_file is None and not ipaddress.ip_address(address[0]).is_loopback:
        log.warning("anyone who reaches %s port %d may use this service: server.api_keys_file is not set", host, port)
    return listener


async def _first_event(*work: Awaitable[object]) -> None:
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
