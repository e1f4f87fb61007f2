"""A decode process: reads headers, writes pixels into the slab and unpacks JSON bodies, one task at a time.

`service.decoders` starts it as a fresh interpreter and may kill it at any moment; it holds nothing worth saving. It is
the only place where bytes from clients meet Pillow or a JSON parser. The socket is of type SOCK_SEQPACKET: a message is
one JSON object, with the descriptors of the memory files it speaks of beside it.

    front-end                              decode process
    Start                          ->                         once; the slab is mapped
                                   <-  {"done": null}
    HeaderTask [image]             ->
                                   <-  {"done": ImageHeader}
    WriteTask  [image]             ->                         pixels go into the slab
                                   <-  {"done": Written}
    UnpackTask [body, output]      ->                         images, and URLs of others, are appended to the output
                                   <-  {"done": Unpacked}
                                   <-  {"error": …}           in place of done: the client's bytes are at fault
"""

import contextlib
import json
import logging
import os
import resource
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import orjson
from pydantic import Field, TypeAdapter

from service.errors import InternalError, InvalidRequest, ServiceError, UndecodableImage
from service.geometry import ImagePlan
from service.header import ImageHeader, Orientation, read_header
from service.image import Gray16, write_patches
from service.unpack import (
    EmbeddingsOptions,
    Frames,
    Route,
    SGLangOptions,
    Source,
    unpack_embeddings,
    unpack_encode,
    unpack_sglang,
)
from tp.process import die_with_parent
from tp.slab import Run, Slab, SlabLayout
from tp.spec import ProcessorSpec

MAX_MESSAGE_BYTES = 2**17  # under the 208 KiB that Linux lets a socket buffer by default
MAX_FDS = 2
_OOM_SCORE = 500  # of 1000: the kernel ends a decode process before the front-end, whose children it can replace

log = logging.getLogger("tpvision.decode")


@dataclass(frozen=True, slots=True)
class Start:
    """First message: what holds for every task."""

    processor: ProcessorSpec
    layout: SlabLayout
    orientation: Orientation
    gray16: Gray16
    kind: Literal["start"] = "start"


@dataclass(frozen=True, slots=True)
class HeaderTask:
    """Read the header of an image file; offset and length in bytes."""

    offset: int
    length: int
    max_pixels: int
    max_memory_bytes: int  # private memory, as in every task; shared mappings like the slab do not count
    kind: Literal["header"] = "header"


@dataclass(frozen=True, slots=True)
class WriteTask:
    """Decode an image file, or that of one frame of a video chunk, and write its patches into a run of the slab."""

    offset: int
    length: int
    plan: ImagePlan
    run: Run
    frame: int
    max_memory_bytes: int
    kind: Literal["write"] = "write"


@dataclass(frozen=True, slots=True)
class UnpackTask:
    """Turn a JSON body of `length` bytes into image files."""

    route: Route
    length: int
    max_images: int
    max_frames: int
    allow_urls: bool
    max_memory_bytes: int
    kind: Literal["unpack"] = "unpack"


@dataclass(frozen=True, slots=True)
class Unpacked:
    """Lengths in bytes of the image files of a JSON body, one after the other in the output, and its other fields."""

    lengths: tuple[int, ...]
    urls: tuple[int, ...]  # indices of those where the output holds a URL
    frames: tuple[int | None, ...]  # for each item: frames of a video chunk, each a file; None: an image, one file
    options: EmbeddingsOptions | SGLangOptions | None  # None on /v1/encode, whose options are in the query


@dataclass(frozen=True, slots=True)
class Written:
    """The pixels are in the slab. How long it took from decoded bytes to there: resize, padding, patches."""

    preprocess_s: float


Task = HeaderTask | WriteTask | UnpackTask
Result = ImageHeader | Written | Unpacked
_TASK: TypeAdapter[Task] = TypeAdapter(Annotated[Task, Field(discriminator="kind")])
_START = TypeAdapter(Start)


def main() -> int:
    """Serve tasks until the front-end closes the socket. Arguments: socket, slab descriptor, the front-end's pid."""
    socket_fd, slab_fd, parent = map(int, sys.argv[1:])
    die_with_parent(parent)
    _be_expendable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ^C and a container's stop reach the whole group; the front-end
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # drains first, and then closes the socket
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # likewise: the front-end reads its settings again
    warnings.simplefilter("ignore")  # Pillow warns about what clients send
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    # A copy: the descriptor that we came with stays open until the kernel closes it, so that its end-of-file tells the
    # front-end that this process has ended, and not that it is about to.
    with socket.socket(fileno=os.dup(socket_fd)) as front_end:
        message, _ = receive(front_end)
        start = _START.validate_json(message)
        decoder = Decoder(start, Slab.map(slab_fd, start.layout))
        reply = _done(None)
        while True:
            front_end.send(reply)
            message, fds = receive(front_end)
            if not message:
                return 0
            try:
                reply = answer(decoder, message, fds)
            finally:
                for fd in fds:
                    os.close(fd)


class Decoder:
    """The three kinds of work. Tasks name memory files by the descriptors that came with them."""

    def __init__(self, start: Start, slab: Slab) -> None:
        self._start = start
        self._slab = slab

    def run(self, task: Task, fds: list[int]) -> Result:
        """The result of a task. Raises ServiceError for what is wrong with the client's bytes."""
        _bound_memory(task.max_memory_bytes)
        if isinstance(task, HeaderTask):
            return self._read_header(task, *fds)
        if isinstance(task, WriteTask):
            return self._write_patches(task, *fds)
        return self._unpack(task, *fds)

    def _read_header(self, task: HeaderTask, fd: int) -> ImageHeader:
        data = _read(fd, task.offset, task.length)
        began_s = time.process_time()
        header = read_header(data, orientation=self._start.orientation, max_pixels=task.max_pixels)
        return replace(header, cpu_s=time.process_time() - began_s)

    def _write_patches(self, task: WriteTask, fd: int) -> Written:
        decoded_at = 0.0

        def note_decoded() -> None:
            nonlocal decoded_at
            decoded_at = time.monotonic()

        write_patches(
            _read(fd, task.offset, task.length),
            task.plan,
            self._start.processor,
            orientation=self._start.orientation,
            gray16=self._start.gray16,
            out=self._slab.pixels(task.run),
            frame=task.frame,
            on_decoded=note_decoded,
        )
        return Written(time.monotonic() - decoded_at)

    def _unpack(self, task: UnpackTask, body_fd: int, output_fd: int) -> Unpacked:
        body = _read(body_fd, 0, task.length)
        options: EmbeddingsOptions | SGLangOptions | None = None
        items: Sequence[Source | Frames]
        if task.route == "encode":
            items = unpack_encode(
                body, max_images=task.max_images, max_frames=task.max_frames, allow_urls=task.allow_urls
            )
        elif task.route == "embeddings":
            items, options = unpack_embeddings(body, max_images=task.max_images, allow_urls=task.allow_urls)
        else:
            items, options = unpack_sglang(body, max_images=task.max_images, allow_urls=task.allow_urls)
        sources = [source for item in items for source in (item if isinstance(item, tuple) else (item,))]
        urls = tuple(index for index, source in enumerate(sources) if isinstance(source, str))
        files = (source.encode() if isinstance(source, str) else source for source in sources)
        lengths = tuple(os.write(output_fd, file) for file in files)
        return Unpacked(lengths, urls, tuple(len(item) if isinstance(item, tuple) else None for item in items), options)


def receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """One message and its descriptors; no bytes at the end of the connection."""
    message, fds, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, MAX_FDS)
    return message, fds


def answer(decoder: Decoder, message: bytes, fds: list[int]) -> bytes:
    """The reply to a task, whatever happens to it."""
    try:
        return _done(decoder.run(_TASK.validate_json(message), fds))
    except ServiceError as error:
        return _failed(error)
    except MemoryError:
        return _failed(UndecodableImage("no memory to decode this image"))
    except Exception as error:  # noqa: BLE001 - the loop must survive whatever a library makes of a client's bytes
        # The message of the exception may quote those bytes, so only its type and place are logged.
        log.error("%s in a decode process\n%s", type(error).__name__, "".join(traceback.format_tb(error.__traceback__)))
        return _failed(InternalError("the image could not be processed, through a fault of ours"))


def _done(result: Result | None) -> bytes:
    reply = orjson.dumps({"done": result})
    if len(reply) > MAX_MESSAGE_BYTES:
        return _failed(InvalidRequest("more images than one JSON body may hold"))
    return reply


def _failed(error: ServiceError) -> bytes:
    fields = {"code": error.code, "message": error.message, "param": error.param, "numbers": error.numbers}
    return json.dumps({"error": fields}).encode()


def _read(fd: int, offset: int, length: int) -> bytes:
    data = os.pread(fd, length, offset)
    if len(data) != length:
        raise InternalError(f"a memory file has {len(data)} of {length} bytes")
    return data


def _bound_memory(num_bytes: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(
        resource.RLIMIT_DATA, (num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard), hard)
    )


def _be_expendable() -> None:
    with contextlib.suppress(OSError):  # /proc may be read-only; then the kernel chooses by size alone
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE))


if __name__ == "__main__":
    sys.exit(main())
