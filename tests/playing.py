"""A rank that a thread of the test plays: the front-end behind it is real, needs no torch, and is ready in a second.

The front-end is an engine in the test's own process (`run_engine`) or a whole service (`PlayedService`).
"""

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from running import COMMAND, GOLDEN, RunningService, until

from service.body import Body
from service.engine import Encoded, EncodeOptions, Engine
from service.record import RequestRecord
from service.tokens import TokenOptions
from tp import wire
from tp.control import ControlClient
from tp.settings import Settings, load_settings
from tp.spec import read_spec

MODEL = GOLDEN / "tiny-k3-f32"
GOOD = (GOLDEN / "images" / "rgb_64x48.png").read_bytes()
OnMessage = Callable[[wire.Message], None]
Use = Callable[[Engine, Settings], Awaitable[None]]


def played_settings(folder: Path, environ: dict[str, str], model: Path = MODEL) -> Settings:
    """What a front-end whose rank is played is started with."""
    flags = {
        "model.path": model,
        "parallel.device": "cpu",
        "parallel.workers": "external",
        "parallel.socket": folder / "control.sock",
    }
    return load_settings(environ=environ, flags=flags).settings


def join(settings: Settings, incarnation: str, on_message: OnMessage = lambda message: None) -> threading.Thread:
    """Play the one rank of the group; `on_message` hears of each batch before it is answered, and of Stop."""
    player = threading.Thread(target=_play, args=(settings, incarnation, on_message), daemon=True)
    player.start()
    return player


def _play(settings: Settings, incarnation: str, on_message: OnMessage) -> None:
    assert settings.parallel.socket is not None and settings.model.path is not None
    control = ControlClient.connect(settings.parallel.socket, timeout_s=20)
    hello = wire.Hello(
        group=0,
        incarnation=incarnation,
        rank=0,
        pid=os.getpid(),
        contract=wire.contract_for(settings, read_spec(settings.model.path), 1),
        weights_fingerprint="played",
    )
    welcome, descriptor = control.greet(hello)
    os.close(descriptor)
    ready = wire.Ready(
        device="cpu",
        weights_bytes=1,
        slab_bytes=welcome.slab_bytes,
        resident_bytes=1,
        warm_up_patches=1024,
        warm_up_s=0.1,
    )
    try:
        control.send(ready)
        while (message := control.receive()) is not None:
            on_message(message)
            if not isinstance(message, wire.Batch):
                return
            control.send(wire.Done(batch_id=message.batch_id, non_finite=[], forward_s=0.01, all_gather_s=0.0))
    except OSError:
        return  # the front-end is gone
    finally:
        control.close()


def run_engine(folder: Path, use: Use, on_message: OnMessage = lambda message: None, **environ: str) -> None:
    """Run `use` with an engine that is ready, and check that every request was answered and every row is free."""

    async def main() -> None:
        settings = played_settings(folder, environ)
        engine = Engine(settings, read_spec(MODEL))
        await engine.start()
        try:
            join(settings, "first", on_message)
            async with asyncio.timeout(30):
                await engine.ready.wait()
                await use(engine, settings)
                await until(lambda: engine.admission.allocator.num_free == settings.slab_patches)
            assert engine.requests.counts.accepted == engine.requests.counts.answered
        finally:
            await engine.stop()

    asyncio.run(main())


async def encode(
    engine: Engine,
    num_images: int = 1,
    record: RequestRecord | None = None,
    *,
    tokens: TokenOptions | None = None,
    may_lend: bool = False,
) -> Encoded:
    with Body() as body:
        body.write(GOOD)
        tokens = tokens or TokenOptions("float32")
        options = EncodeOptions(engine.settings, policy="refuse", tokens=tokens, may_lend=may_lend)
        return await engine.encode([body.image] * num_images, options, record or RequestRecord())


class Hung:
    """Ranks that hang in their first batch, like a stopped process: they hear nothing and hold on to the slab."""

    def __init__(self) -> None:
        self.batches: list[wire.Batch] = []
        self.goes_on = threading.Event()

    def hear(self, message: wire.Message) -> None:
        assert isinstance(message, wire.Batch)
        self.batches.append(message)
        self.goes_on.wait(20)


class PlayedService(RunningService):
    """`tpvision serve` with a played rank. It ends with the block that it is used in."""

    def __init__(
        self,
        folder: Path,
        on_message: OnMessage = lambda message: None,
        command: Sequence[str] = COMMAND,
        model: Path = MODEL,
        **environ: str,
    ) -> None:
        settings = played_settings(folder, environ, model)
        arguments = ["--model", str(model), "--workers", "external", "--socket", str(settings.parallel.socket)]
        super().__init__(arguments, environ, command)
        join(settings, "first", on_message)

    def __enter__(self) -> "PlayedService":
        self.wait_ready()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.stop()
