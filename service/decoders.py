"""The decode processes: started, given one task at a time and a deadline for it, killed, replaced.

A call returns or raises only when no process can write for it any more: it has replied, or it is dead and reaped. That
holds for a cancelled call too, so its caller may free the rows of the slab at once. What runs inside is
`service.decode_process`; no image byte is looked at here. `service.engine` owns the pool.
"""

import asyncio
import itertools
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import orjson
from pydantic import TypeAdapter

from service import decode_process as child
from service import signals
from service.body import Body, ImageBytes, Item, VideoChunk
from service.errors import (
    BY_CODE,
    DecodeTimeout,
    InternalError,
    InvalidRequest,
    NotReady,
    ServiceError,
    UndecodableImage,
)
from service.geometry import ImagePlan
from service.header import SLOW_S, ImageHeader
from service.turns import Turn, Turns
from service.unpack import Route
from tp.settings import LimitSettings, Settings
from tp.slab import Run, Slab
from tp.spec import ProcessorSpec

START_TIMEOUT_S = 60.0  # a start takes 0.3 s on an idle core
_QUICK_CPU_S = SLOW_S  # what a task may use in the process that slow ones leave to the others
_STALLED_SHARE = 0.1  # of a deadline: a process with less CPU than that was stopped or starved, whatever it was to do
_UNWANTED_S = 0.3  # for a task that nobody waits for any more: what it costs to start another process
_LOOK_AGAIN_S = 0.1
_BACK_OFF_S = (0.0, 0.2, 1.0, 5.0)  # before a start, by failed ones in a row; the last one repeats
# Private memory that a decode process may take; more is a MemoryError there. Measured with Pillow 13: 60 MB before any
# task; 16 bytes a pixel (WebP; AVIF 12, others 5 to 9) beside the file; 14 for a byte of a JSON body (5 of them used).
_BASE_BYTES = 256 * 2**20
_BYTES_PER_UNIT = 24
# For glibc: a picture's fresh memory, a page of 4 KB at a time, was 40% of a large JPEG's decode. So it asks for huge
# pages, and keeps 32 MB for the next picture. An operator's own GLIBC_TUNABLES take the place of these.
_MALLOC = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=33554432"
_OWN_ENVIRON = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_ROOT = Path(__file__).parents[1]  # `service` can be imported from here, installed or not

Result = TypeVar("Result")
Ending = Literal["late", "stalled", "slow", "unwanted"]  # why we killed a process, see _WHY

_WHY: dict[Ending, str] = {
    "late": "killed at its task's deadline",
    "stalled": "killed at its task's deadline, having hardly worked on it",
    "slow": "its task was slow and gave way to others",
    "unwanted": "nobody waits for its task any more",
}
_HEADER = TypeAdapter(ImageHeader)
_UNPACKED = TypeAdapter(child.Unpacked)
_WRITTEN = TypeAdapter(child.Written)

log = logging.getLogger("tpvision.decoders")


class DecoderStartError(RuntimeError):
    """A decode process could not be started, or ended, or hung, before it was ready."""


class UnpackedBody:
    """The image files of a JSON body, in a memory file of their own, and an embeddings body's options.

    `images` has every file, frames of video chunks included, and `names` what an error calls each beside the name of
    the list. `urls` has the URLs among them by index; `images` holds their places all the same.
    """

    def __init__(self, body: Body, unpacked: child.Unpacked) -> None:
        self._body = body
        self._frames = unpacked.frames
        self.options = unpacked.options
        self.names = tuple(_names(unpacked.frames))
        ends = itertools.accumulate(unpacked.lengths)
        self.images = tuple(
            ImageBytes(body.fd, end - length, length) for end, length in zip(ends, unpacked.lengths, strict=True)
        )
        places = {index: self.images[index] for index in unpacked.urls}
        self.urls = {index: os.pread(body.fd, at.length, at.offset).decode() for index, at in places.items()}

    def items(self, images: Sequence[ImageBytes]) -> list[Item]:
        """The items of the body, made of its image files: `images`, or the same with what was fetched for its URLs."""
        files = iter(images)
        return [
            next(files) if num_frames is None else VideoChunk(tuple(itertools.islice(files, num_frames)))
            for num_frames in self._frames
        ]

    def close(self) -> None:
        """Let go of the memory."""
        self._body.close()

    def __enter__(self) -> "UnpackedBody":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class DecoderPool:
    """A fixed number of decode processes, first come first served as `service.turns` has it.

    Start and stop it on the main thread's loop: the kernel ends decode processes together with the thread that started
    them.
    """

    def __init__(self, processor: ProcessorSpec, settings: Settings, slab: Slab) -> None:
        self.num_processes = settings.num_decode_processes(len(os.sched_getaffinity(0)))
        self._allow_urls = settings.urls.fetch == "on"
        self._slab = slab
        self._start = child.Start(
            processor,
            slab.layout,
            orientation=settings.image.orientation,
            gray16=settings.image.gray16,
        )
        self._turns: Turns[_Process] = Turns(self.num_processes)
        self._processes: set[_Process] = set()
        self._seats: list[asyncio.Task[None]] = []
        self._is_stopping = False
        self.num_replaced = 0

    @property
    def pids(self) -> list[int]:
        """The processes alive now, some of which may not be ready yet."""
        return [process.pid for process in self._processes]

    async def start(self) -> None:
        """Start all processes and return when they are ready. Raises DecoderStartError, and leaves none then."""
        starting = asyncio.gather(*(self._start_process() for _ in range(self.num_processes)))
        try:
            processes = await asyncio.shield(starting)  # a process keeps a cancellation back until it has answered,
        except BaseException:  # which it may never do; cancelled or failed, none may be left behind
            await self.stop()
            await asyncio.gather(starting, return_exceptions=True)
            raise
        self._seats = [asyncio.create_task(self._keep_seat(process)) for process in processes]

    async def stop(self) -> None:
        """End all processes and wait until they are gone. Calls still in progress raise NotReady."""
        self._is_stopping = True
        self._turns.close()
        for seat in self._seats:
            seat.cancel()
        for process in self._processes:
            process.kill()
        await asyncio.gather(
            *self._seats, *(process.gone.wait() for process in self._processes), return_exceptions=True
        )
        self._processes.clear()

    async def read_header(self, image: ImageBytes, limits: LimitSettings) -> ImageHeader:
        """The header of an image file. `limits` are those of the request, here as in the other calls.

        Raises UnsupportedImage, UndecodableImage, ImageTooLarge, DecodeTimeout, or NotReady while stopping.
        """
        task = child.HeaderTask(image.offset, image.length, limits.max_image_pixels, max_memory_bytes(limits))
        return _HEADER.validate_python(await self._decode(task, image.fd, limits))

    async def write_patches(
        self,
        image: ImageBytes,
        plan: ImagePlan,
        run: Run,
        limits: LimitSettings,
        frame: int = 0,
        *,
        is_slow: bool = False,
    ) -> child.Written:
        """Decode an image file into the run's pixel rows, or those of one frame. Raises what `read_header` does.

        `is_slow` is what its header says; it is found out anyway, at some cost.
        """
        task = child.WriteTask(image.offset, image.length, plan, run, frame, max_memory_bytes(limits))
        return _WRITTEN.validate_python(await self._decode(task, image.fd, limits, is_slow=is_slow))

    async def unpack(self, body: Body, route: Route, limits: LimitSettings, *, max_frames: int = 1) -> "UnpackedBody":
        """The images of a JSON body, which stays the caller's to close, like the result.

        `max_frames` is what a video chunk of the model may have; 1: it takes none. Raises InvalidRequest,
        TooManyImages, TooManyFrames, DecodeTimeout, or NotReady while stopping.
        """
        task = child.UnpackTask(
            route,
            body.num_bytes,
            limits.max_images_per_request,
            max_frames,
            self._allow_urls,
            max_memory_bytes(limits),
        )
        try:
            return await _tried(lambda is_slow: self._unpack(task, body, limits, is_slow=is_slow))
        except _DiedError as error:
            raise InvalidRequest(f"reading the JSON body ended the process that did it ({error})") from None

    async def _unpack(
        self, task: child.UnpackTask, body: Body, limits: LimitSettings, *, is_slow: bool
    ) -> UnpackedBody:
        with ExitStack() as undo:
            output = undo.enter_context(Body())
            unpacked = _UNPACKED.validate_python(await self._run(task, [body.fd, output.fd], limits, is_slow=is_slow))
            undo.pop_all()
            return UnpackedBody(output, unpacked)

    async def _decode(
        self, task: child.HeaderTask | child.WriteTask, fd: int, limits: LimitSettings, *, is_slow: bool = False
    ) -> Any:
        try:
            return await _tried(lambda is_slow: self._run(task, [fd], limits, is_slow=is_slow), is_slow=is_slow)
        except _DiedError as error:
            raise UndecodableImage(
                f"decoding this image ended the process that did it ({error})", numbers=error.numbers
            ) from None

    async def _run(self, task: child.Task, fds: Sequence[int], limits: LimitSettings, *, is_slow: bool) -> Any:
        """What the child answers.

        Raises its ServiceError, DecodeTimeout, NotReady, _StalledError, _DiedError, or _GaveWayError.
        """
        turn = await self._send(orjson.dumps(task), fds, is_slow=is_slow)
        process = turn.worker
        timeout_s = limits.decode_timeout_s
        try:
            with self._reviewed(turn):
                reply = await process.receive(timeout_s)
        finally:
            self._turns.end(turn)
        if reply is not None:
            return _result(reply)
        if self._is_stopping:
            raise NotReady("the service is stopping")
        match process.ending:
            case "late":
                raise DecodeTimeout(f"not decoded after {timeout_s:g} s", numbers={"limit_s": timeout_s})
            case "stalled":
                raise _StalledError
            case "slow":
                raise _GaveWayError
        raise _DiedError(process.exit_code)

    async def _send(self, message: bytes, fds: Sequence[int], *, is_slow: bool) -> "Turn[_Process]":
        """Give a task to a process, when it is its turn."""
        while True:
            turn = await self._turns.take(is_slow=is_slow)
            if turn is None:
                raise NotReady("the service is stopping")
            try:
                turn.worker.send(message, fds)
            except ConnectionError:
                self._turns.end(turn)  # it died idle; its seat sees to that
            except OSError:
                self._turns.end(turn)
                raise
            else:
                return turn

    @contextmanager
    def _reviewed(self, turn: "Turn[_Process]") -> Iterator[None]:
        """While a quick task is at work: once it has used more CPU than such may, it is slow, or gives way to others.

        By CPU and not by the clock: on a busy machine every task takes long.
        """
        if turn.is_slow:
            yield
            return
        loop, process = asyncio.get_running_loop(), turn.worker
        until_s = process.cpu_s() + _QUICK_CPU_S
        timer: asyncio.TimerHandle

        def review() -> None:
            nonlocal timer
            left_s = until_s - process.cpu_s()
            if left_s <= 0 and not self._turns.note_slow(turn):
                process.end("slow")
            elif not turn.is_slow:
                timer = loop.call_later(max(left_s, _LOOK_AGAIN_S), review)

        timer = loop.call_later(_QUICK_CPU_S, review)
        try:
            yield
        finally:
            timer.cancel()

    async def _keep_seat(self, process: "_Process") -> None:
        """See to it that one process is there, by starting another whenever it is gone."""
        while True:
            self._turns.add(process)
            await process.gone.wait()
            reason = _WHY[process.ending] if process.ending else _DiedError(process.exit_code)
            log.warning("decode process %d is gone (%s), starting another", process.pid, reason)
            process = await self._replacement()
            self.num_replaced += 1

    async def _replacement(self) -> "_Process":
        for num_failures in itertools.count():
            await asyncio.sleep(_BACK_OFF_S[min(num_failures, len(_BACK_OFF_S) - 1)])
            try:
                return await self._start_process()
            except DecoderStartError as error:
                log.error("%s", error)
        raise AssertionError("unreachable")

    async def _start_process(self) -> "_Process":
        try:
            process = _Process(self._slab.fd, on_gone=self._processes.discard)
            self._processes.add(process)
            process.send(orjson.dumps(self._start), ())
        except OSError as error:  # no memory, processes or files for it, or it has ended already
            raise DecoderStartError(f"a decode process cannot be started: {error.strerror}") from error
        if await process.receive(START_TIMEOUT_S) is None:
            reason = "too slow" if process.ending else _DiedError(process.exit_code)
            raise DecoderStartError(f"a decode process did not start ({reason})")
        return process


class _DiedError(Exception):
    """A process ended by itself in the middle of a task."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}")
        self.numbers = {"signal": -exit_code} if exit_code < 0 else {"exit_code": exit_code}


class _StalledError(Exception):
    """A process with a task had hardly any CPU: somebody stopped it, or the machine is too busy."""


class _GaveWayError(Exception):
    """A task turned out slow where there was no room for another such, and was ended with its process."""


class _Process:
    """One decode process and our end of its socket."""

    def __init__(self, slab_fd: int, *, on_gone: Callable[["_Process"], None]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", child.__name__, str(theirs.fileno()), str(slab_fd), str(os.getpid())]
            try:
                with signals.held_back():  # until it ignores them: it would end before it is ready
                    self._popen = subprocess.Popen(
                        command,
                        cwd=_ROOT,
                        env={"GLIBC_TUNABLES": _MALLOC, **os.environ, **_OWN_ENVIRON},
                        pass_fds=(theirs.fileno(), slab_fd),
                        stdin=subprocess.DEVNULL,
                    )
            except OSError:
                ours.close()
                raise
        ours.setblocking(False)
        self.pid = self._popen.pid
        self.gone = asyncio.Event()  # dead and reaped
        self.ending: Ending | None = None
        self._is_cut_off = False
        self._on_gone = on_gone
        self._socket = ours
        self._reply: asyncio.Future[bytes | None] | None = None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(ours.fileno(), self._on_readable)

    @property
    def is_usable(self) -> bool:
        """Whether it is worth sending it a task."""
        return not (self.ending or self._is_cut_off or self.gone.is_set())

    @property
    def exit_code(self) -> int:
        """Of a process that is gone; negative for a signal."""
        return self._popen.wait()

    def send(self, message: bytes, fds: Sequence[int]) -> None:
        """Send a message; `receive` must follow at once. Raises ConnectionError when the process has just died."""
        try:
            socket.send_fds(self._socket, [message], fds)
        except ConnectionError:
            self._is_cut_off = True
            raise
        self._reply = self._loop.create_future()

    async def receive(self, timeout_s: float) -> bytes | None:
        """The reply; None when the process is gone without one, be it killed after `timeout_s`.

        A cancellation is raised only then, and lets the process live on if it replies within `_UNWANTED_S`.
        """
        assert self._reply is not None
        timers = [self._loop.call_later(timeout_s, self._on_late, self.cpu_s() + _STALLED_SHARE * timeout_s)]
        cancelled: asyncio.CancelledError | None = None
        while not self._reply.done():
            try:
                await asyncio.wait([self._reply])
            except asyncio.CancelledError as error:
                cancelled = error
                timers.append(self._loop.call_later(_UNWANTED_S, self.end, "unwanted"))
        for timer in timers:
            timer.cancel()
        if cancelled is not None:
            raise cancelled
        return self._reply.result()

    def kill(self) -> None:
        """End it now. `gone` is set when that has happened."""
        self._popen.kill()

    def end(self, ending: Ending) -> None:
        """End it now, for that reason."""
        self.ending = ending
        self.kill()

    def cpu_s(self) -> float:
        """CPU seconds that it has used so far, its start among them; 0 where that is not told."""
        try:
            return time.clock_gettime(~self.pid << 3 | 2)  # the process's clock, as clock_getcpuclockid(3) makes it
        except OSError:
            return 0.0

    def _on_late(self, least_cpu_s: float) -> None:
        self.end("stalled" if 0 < self.cpu_s() < least_cpu_s or self._is_stopped() else "late")

    def _is_stopped(self) -> bool:
        """Whether somebody has stopped it (SIGSTOP)."""
        try:
            return os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return False  # it is dead, which we are about to be told

    def _on_readable(self) -> None:
        try:
            message = self._socket.recv(child.MAX_MESSAGE_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            message = b""  # it died with our message unread
        if message and self._reply is not None and not self._reply.done():
            self._reply.set_result(message)
        else:
            self._bury()

    def _bury(self) -> None:
        """At the end-of-file: the kernel closes a dead process's files last, after its memory, so waiting is short."""
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        self.kill()
        self._popen.wait()
        if self._reply is not None and not self._reply.done():
            self._reply.set_result(None)
        self.gone.set()
        self._on_gone(self)


def _names(frames: Sequence[int | None]) -> Iterator[str]:
    for index, num_frames in enumerate(frames):
        if num_frames is None:
            yield f"[{index}]"
        else:
            yield from (f"[{index}].frames[{frame}]" for frame in range(num_frames))


async def _tried(attempt: Callable[[bool], Awaitable[Result]], *, is_slow: bool = False) -> Result:
    """The result of an attempt, which is told whether its task is slow.

    Made again as slow where it gave way, and as before where its process stalled, which is never its fault; once more
    where that died: somebody else may have ended it.
    """
    has_died = False
    while True:
        try:
            return await attempt(is_slow)
        except _GaveWayError:
            is_slow = True
        except _StalledError:
            continue
        except _DiedError:
            if has_died:
                raise
            has_died = True


def _result(reply: bytes) -> Any:
    content = json.loads(reply)
    if "error" not in content:
        return content["done"]
    error = content["error"]
    cls: type[ServiceError] = BY_CODE.get(error["code"], InternalError)
    raise cls(error["message"], param=error["param"], numbers=error["numbers"])


def max_memory_bytes(limits: LimitSettings) -> int:
    """Private memory that a decode process may take, enough for whatever is within the limits."""
    units = max(limits.max_image_pixels, limits.max_body_bytes)
    return _BASE_BYTES + 2 * limits.max_body_bytes + _BYTES_PER_UNIT * units
