"""`tpvision demo`: the main job on a model that the project makes itself, with no download.

Writes a seeded checkpoint in K3's layout, serves it with tensor-parallel ranks on the CPU, sends it the photograph that
ships with the project, prints what came back, and stays up. It downscales pictures that are too large: a phone's are.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.progress import Progress

from service.client import AsyncClient
from service.demo_model import write_demo_model
from service.logs import start_logging
from service.server import serve
from tp.settings import Settings, load_settings
from tp.spec import check_world_size, read_spec

PHOTOGRAPH = Path(__file__).parent / "assets" / "photograph.jpg"


async def run_demo(folder: Path, size: Literal["tiny", "full"], *, port: int, once: bool, tp: int) -> int:
    """Serve the model in `folder`, ask, print; then serve on until a signal, or exit at once. The exit status."""
    console = _console()
    settings = demo_settings(folder, port=port, tp=tp)
    start_logging(settings)
    check_world_size(read_spec(folder), tp)
    stop = asyncio.Event()

    async def on_ready(url: str) -> None:
        if size == "full":
            console.print("sending the photograph: K3's true shape takes a minute or two on a few cores")
        await _show_photograph(console, url)
        if once:
            stop.set()
        else:
            console.print(f"\nStill serving, in a browser too: {url}/ (end it with Ctrl-C)")
            console.print("The same again, or with a picture of yours:\n")
            console.print(f"  curl -sS --fail-with-body {url}/v1/encode ", end="")
            console.print(f"--data-binary @{PHOTOGRAPH} -o embeddings.safetensors\n")
            limit = settings.capacity.max_patches_per_image
            console.print(f"A picture of over {limit:,} patches is downscaled, and its answer says so; ", end="")
            console.print("`tpvision serve` refuses it unless told otherwise.\n")

    return await serve(settings, read_spec(folder), on_ready=on_ready, stop=stop)


@contextmanager
def made_model(size: Literal["tiny", "full"], out: Path | None) -> Iterator[Path]:
    """The folder of a demo model, which is removed after the block unless it is `out`."""
    with _model_folder(out) as folder:
        _make_model(_console(), folder, size)
        yield folder


def demo_settings(folder: Path, *, port: int, tp: int) -> Settings:
    """Those that serve the demo model in `folder`, on the CPU."""
    flags = {
        "model.path": folder,
        "model.name": "demo",
        "capacity.policy": "downscale",
        "parallel.tensor": tp,
        "parallel.device": "cpu",
        "server.port": port,
        "server.log_format": "console",
    }
    return load_settings(environ=os.environ, flags=flags).settings


def _console() -> Console:
    return Console(highlight=False, soft_wrap=True)


@contextmanager
def _model_folder(out: Path | None) -> Iterator[Path]:
    if out is not None:
        yield out
        return
    with tempfile.TemporaryDirectory(prefix="tpvision-demo-") as folder:
        yield Path(folder)


def _make_model(console: Console, folder: Path, size: Literal["tiny", "full"]) -> None:
    started = time.monotonic()
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("making the demo model", total=None)
        write_demo_model(
            folder, size=size, progress=lambda done, total: progress.update(task, completed=done, total=total)
        )
    console.print(f"made a {size} demo model in {folder} ({time.monotonic() - started:.1f} s)")


async def _show_photograph(console: Console, url: str) -> None:
    started = time.monotonic()
    async with AsyncClient(url, trust_env=False) as client:
        embedding = await client.encode(PHOTOGRAPH)
    elapsed_s = time.monotonic() - started
    console.print(f"\n[bold]{PHOTOGRAPH.name}[/bold] -> merged vision tokens in {elapsed_s * 1000:.0f} ms")
    console.print(f"  embeddings    {embedding.dtype} {list(embedding.shape)}")
    for name in (
        "original_size",
        "encoded_size",
        "padded_size",
        "grid_thw",
        "patches",
        "num_tokens",
        "tier",
        "downscaled",
    ):
        console.print(f"  {name:<14}{getattr(embedding.geometry, name)}")
    stages = ", ".join(f"{stage} {duration_ms:g}" for stage, duration_ms in embedding.stages_ms.items())
    console.print(f"  stages (ms)   {stages}")
