"""`tpvision embed`: every image of a folder, a glob or a Parquet file, through a service, into one file.

find -> skip what the journal has -> encode, a few at a time -> journal -> write the output. An image that cannot be
embedded is recorded with its error; a service that is lost ends the run, and the same line goes on from there.
"""

import asyncio
import hashlib
import importlib.util
import logging
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from service.client import AsyncClient, NoAnswer, Options
from service.embed_journal import Entry, Journal
from service.embed_output import FORMATS, Shape, shards_of, write_output
from service.embed_sources import Source, Sources
from service.errors import (
    BodyTooLarge,
    DeadlineExceeded,
    EncodeFailed,
    NonFiniteOutput,
    ServiceError,
    Unprocessable,
    UnsupportedImage,
)
from service.server import serve
from tp.settings import Settings
from tp.spec import EncoderSpec

log = logging.getLogger("tpvision.embed")

# What is wrong with one image alone. Anything else would be wrong with the next one too.
_OF_THE_IMAGE = (BodyTooLarge, UnsupportedImage, Unprocessable, NonFiniteOutput, EncodeFailed, DeadlineExceeded)
_LOG_EVERY_S = 10.0


class EmbedError(ValueError):
    """The command asks for something that cannot be done."""


class EmbedStopped(Exception):
    """The service was lost, or will not do this for anybody. What is finished is kept."""


@dataclass(frozen=True, slots=True)
class Job:
    """What to embed, how, and where to. Raises EmbedError."""

    places: Sequence[str]
    out: Path
    column: str = "image"
    pooled: bool = True
    normalize: bool = False
    oversize: Literal["refuse", "downscale"] | None = None
    concurrency: int = 8
    deadline_s: float = 300.0
    shard_bytes: int = 4 << 30

    def __post_init__(self) -> None:
        if self.out.suffix not in FORMATS:
            raise EmbedError(f"{self.out}: the name of the output ends in {' or '.join(FORMATS)}")
        if self.out.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
            raise EmbedError(f"{self.out} needs the package pyarrow: pip install 'tpvision[parquet]'")
        if not self.out.parent.is_dir():
            raise EmbedError(f"there is no folder {self.out.parent}")
        if not self.journal_path.exists() and (found := shards_of(self.out)):
            raise EmbedError(f"{found[0]} is there already; remove it, or name another file")
        if min(self.concurrency, self.shard_bytes, self.deadline_s) <= 0:
            raise EmbedError("concurrency, deadline and shard size are above zero")

    @property
    def journal_path(self) -> Path:
        """What is finished, while the output is not."""
        return self.out.with_name(f"{self.out.name}.journal")


@dataclass(frozen=True, slots=True)
class Tally:
    """How it went: what was written, and the images that have no embedding."""

    num_images: int
    num_before: int  # finished by an earlier run
    seconds: float
    paths: Sequence[Path]
    errors: Sequence[Entry]


async def embed(job: Job, sources: Sources, url: str, **client_options: Any) -> Tally:
    """Embed `sources` through the service at `url`; keywords are AsyncClient's.

    Raises EmbedError for a URL that is none, EmbedStopped, JournalError, SourceError for a Parquet file that breaks
    off, OSError when the disk is full.
    """
    started = time.monotonic()
    try:
        opened = AsyncClient(url, deadline_s=job.deadline_s, **client_options)
    except (ValueError, httpx.InvalidURL) as error:
        raise EmbedError(str(error)) from error
    async with opened as client:
        try:
            model = await client.model()
        except (ServiceError, NoAnswer) as error:
            raise EmbedStopped(str(error)) from error
        shape = Shape(model.id, "float32" if job.pooled else model.dtype, model.dimensions)
        with Journal(job.journal_path, _describe(job, shape)) as journal:
            with ThreadPoolExecutor(1) as disk:  # its thread has ended before the journal is closed
                num_before = await _encode_all(job, sources, client, journal, disk)
                errors = [entry for entry in journal.entries() if entry.is_error]
                write = partial(write_output, journal, shape, job.out, shard_bytes=job.shard_bytes)
                paths = await asyncio.get_running_loop().run_in_executor(disk, write)
            journal.remove()
    return Tally(sources.num_images, num_before, time.monotonic() - started, paths, errors)


async def embed_with_own_service(job: Job, sources: Sources, settings: Settings, spec: EncoderSpec) -> Tally | None:
    """The same through a service on loopback that lives as long as it takes; None when a signal ended it."""
    stop = asyncio.Event()
    tally = None

    async def on_ready(url: str) -> None:
        nonlocal tally
        tally = await embed(job, sources, url, trust_env=False)  # loopback needs no proxy
        stop.set()

    own = {"host": "127.0.0.1", "port": 0, "probe_port": None, "api_keys_file": None}
    settings = settings.model_copy(update={"server": settings.server.model_copy(update=own)})
    if await serve(settings, spec, on_ready=on_ready, stop=stop) != 0:
        raise EmbedStopped("the service failed")
    return tally


def _describe(job: Job, shape: Shape) -> dict[str, Any]:
    """What must be the same for a run to go on from where another one ended."""
    asked = {"places": list(job.places), "column": job.column, "oversize": job.oversize}
    return {**asked, **asdict(shape), "pooled": job.pooled, "normalize": job.normalize}


async def _encode_all(job: Job, sources: Sources, client: AsyncClient, journal: Journal, disk: Executor) -> int:
    """Finish every image that the journal does not have as it is now; how many it had."""
    loop = asyncio.get_running_loop()
    before = journal.versions()
    slots = asyncio.Semaphore(job.concurrency)
    num_before = 0
    shown = _Shown(sources.num_images)
    with shown.bar:

        async def finish(source: Source) -> None:
            try:
                entry, data = await _encode(job, source, client)
                await loop.run_in_executor(disk, journal.add, entry, data)
                shown.advance(failed=entry.is_error)
            finally:
                slots.release()

        try:
            async with asyncio.TaskGroup() as tasks:
                while (source := await asyncio.to_thread(next, sources.images, None)) is not None:
                    if before.pop(source.name, None) == source.version:
                        num_before += 1
                        shown.skip()
                        continue
                    await slots.acquire()
                    tasks.create_task(finish(source))
        except ExceptionGroup as group:
            error = group.exceptions[0]
            if isinstance(error, ServiceError | NoAnswer):
                raise EmbedStopped(str(error)) from error
            raise error from None
    journal.forget(before)
    return num_before


async def _encode(job: Job, source: Source, client: AsyncClient) -> tuple[Entry, bytes | memoryview]:
    options: Options = {"pooled": job.pooled, "normalize": job.normalize}
    if job.oversize is not None:
        options["oversize"] = job.oversize
    sha256 = None
    try:
        file = await asyncio.to_thread(source.read)
        sha256 = (await asyncio.to_thread(hashlib.sha256, file)).hexdigest()
        if not file:
            raise UnsupportedImage("the file is empty")
        embedding = await client.encode(file, **options)
    except OSError as error:
        about = {"code": "unreadable_file", "message": error.strerror or str(error)}
    except _OF_THE_IMAGE as error:
        about = {"code": error.code, "message": error.message}
    else:
        num_rows = 1 if job.pooled else embedding.shape[0]
        about = asdict(embedding.geometry)
        return Entry(source.name, source.version, sha256, about, num_rows, len(embedding.data)), embedding.data
    return Entry(source.name, source.version, sha256, about, 0, 0), b""


class _RateColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        """Over the last half minute, or the whole when it is done."""
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:.1f} images/s")


class _Shown:
    """How far it is: a bar on a terminal, a log line now and then elsewhere."""

    def __init__(self, num_images: int) -> None:
        columns = (BarColumn(), MofNCompleteColumn(), _RateColumn(), TextColumn("{task.fields[failed]} failed"))
        console = Console(stderr=True)
        self.bar = Progress(*columns, TimeRemainingColumn(), console=console, disable=not sys.stderr.isatty())
        self.bar.add_task("", total=num_images, failed=0)
        (self._task,) = self.bar.tasks
        self._num_images = num_images
        self._logged_s = time.monotonic()

    def skip(self) -> None:
        """An image was finished before: it would only blur the rate."""
        self._num_images -= 1
        self.bar.update(self._task.id, total=self._num_images)

    def advance(self, *, failed: bool) -> None:
        """An image is finished."""
        num_failed = self._task.fields["failed"] + failed
        self.bar.update(self._task.id, advance=1, failed=num_failed)
        if self.bar.disable and time.monotonic() - self._logged_s > _LOG_EVERY_S:
            self._logged_s = time.monotonic()
            rate = f"{self._task.speed or 0:.1f} images/s, {self._task.time_remaining or 0:.0f} s to go"
            log.info("%d of %d images, %d failed, %s", self._task.completed, self._num_images, num_failed, rate)
