"""Real decode processes throughout. A task that must last is one whose process is stopped with SIGSTOP."""

import asyncio
import base64
import gc
import io
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import uvloop
from PIL import Image
from running import until
from slow_pictures import with_chunks, with_scans

from service import decoders
from service import header as header_module
from service.body import Body, ImageBytes, VideoChunk
from service.decoders import DecoderPool, DecoderStartError, UnpackedBody
from service.errors import (
    DecodeTimeout,
    ImageTooLarge,
    InvalidRequest,
    NotReady,
    TooManyFrames,
    TooManyImages,
    UndecodableImage,
    UnsupportedImage,
)
from service.geometry import ImagePlan, plan_image
from service.header import ImageHeader
from service.image import write_patches
from service.unpack import Route
from tp.settings import LimitSettings, Settings
from tp.slab import Run, Slab, SlabLayout
from tp.spec import ProcessorSpec

PROCESSOR = ProcessorSpec("navit", 14, 16384, 512, (0.5,) * 3, (0.5,) * 3, None, "before_resize")
LAYOUT = SlabLayout(num_patches=512, patch_bytes=588, token_bytes=64)
RUN = Run(start=100, num_patches=24)  # of PICTURE

Use = Callable[[DecoderPool, Slab], Awaitable[None]]
Runner = Callable[..., None]


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def noise(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8))


PICTURE = encoded(noise(80, 50))


def plan_of(width: int, height: int) -> ImagePlan:
    return plan_image(width, height, PROCESSOR, (512,), "downscale")


PLAN = plan_of(80, 50)


@contextmanager
def stored(data: bytes, prefix: bytes = b"") -> Iterator[ImageBytes]:
    with Body() as body:
        body.write(prefix + data)
        yield ImageBytes(body.fd, len(prefix), len(data))


@contextmanager
def json_body(text: bytes) -> Iterator[Body]:
    with Body() as body:
        body.write(text)
        yield body


class LimitedPool(DecoderPool):
    """Every request comes under the limits of the pool's settings."""

    def __init__(self, processor: ProcessorSpec, settings: Settings, slab: Slab) -> None:
        super().__init__(processor, settings, slab)
        self.limits = settings.limits

    async def read_header(self, image: ImageBytes) -> ImageHeader:
        return await super().read_header(image, self.limits)

    async def write_patches(
        self, image: ImageBytes, plan: ImagePlan, run: Run, frame: int = 0, *, is_slow: bool = False
    ) -> None:
        await super().write_patches(image, plan, run, self.limits, frame, is_slow=is_slow)

    async def unpack(self, body: Body, route: Route, **options: Any) -> UnpackedBody:
        return await super().unpack(body, route, self.limits, **options)


def run_pool(use: Use, *, processes: int = 1, loop: str = "uvloop", **limits: Any) -> None:
    """Run `use` with a started pool, and check that nothing is left when it is stopped."""
    settings = Settings.model_validate({"image": {"decode_processes": processes}, "limits": limits})

    async def main() -> None:
        slab = Slab.create(LAYOUT)
        pool = LimitedPool(PROCESSOR, settings, slab)
        gc.collect()  # what earlier loops and slabs still hold
        before = descriptors()
        try:
            await pool.start()
            pids = pool.pids
            async with asyncio.timeout(60):
                await use(pool, slab)
        finally:
            pids += pool.pids
            await pool.stop()
            assert not [pid for pid in pids if is_child(pid)]
            assert descriptors() == before
            slab.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop if loop == "uvloop" else None) as runner:
        runner.run(main())


both_loops = pytest.mark.parametrize("loop", ["asyncio", "uvloop"])


def descriptors() -> list[str]:
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the folder's own descriptor
            links.append(str(entry.readlink()))
    return sorted(links)


def read_proc(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text()


def wait_until_dead(pid: int) -> None:
    """And leave the reaping to its owner."""
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def is_child(pid: int) -> bool:
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


async def begin(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Start work in the background, up to where it waits for its process."""
    task = asyncio.ensure_future(work)
    await asyncio.sleep(0)
    return task


@pytest.mark.parametrize("own", [None, "glibc.malloc.tcache_count=3"])
def test_glibc_is_told_how_to_get_memory_unless_an_operator_tells_it(
    own: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", own) if own else monkeypatch.delenv("GLIBC_TUNABLES", raising=False)

    async def use(pool: DecoderPool, slab: Slab) -> None:
        (told,) = re.findall(r"GLIBC_TUNABLES=([^\0]*)", read_proc(pool.pids[0], "environ"))
        assert told == own if own else "hugetlb=1" in told

    run_pool(use)


@both_loops
def test_pixels_are_those_of_write_patches_in_this_process(loop: str) -> None:
    expected = np.zeros((RUN.num_patches, 588), np.uint8)
    write_patches(PICTURE, PLAN, PROCESSOR, orientation="apply", gray16="scale", out=expected)

    async def use(pool: DecoderPool, slab: Slab) -> None:
        with stored(PICTURE, prefix=b"another file") as image:
            header = await pool.read_header(image)
            assert (header.width, header.height, header.format) == (80, 50, "PNG")
            await pool.write_patches(image, PLAN, RUN)
        assert np.array_equal(slab.pixels(RUN), expected)
        assert not slab.pixels(Run(0, RUN.start)).any()
        assert not slab.pixels(Run(RUN.end, LAYOUT.num_patches - RUN.end)).any()

    run_pool(use, loop=loop)


def test_many_tasks_over_few_processes() -> None:
    async def use(pool: DecoderPool, slab: Slab) -> None:
        with stored(PICTURE) as image:
            headers = await asyncio.gather(*(pool.read_header(image) for _ in range(50)))
        assert len(set(headers)) == 1 and len(headers) == 50

    run_pool(use, processes=2)


def test_errors_of_the_client_keep_class_and_numbers() -> None:
    async def use(pool: DecoderPool, slab: Slab) -> None:
        with stored(b"hello") as image, pytest.raises(UnsupportedImage):
            await pool.read_header(image)
        with stored(encoded(noise(101, 100))) as image, pytest.raises(ImageTooLarge) as caught:
            await pool.read_header(image)
        assert caught.value.numbers["limit"] == 10_000
        with stored(PICTURE[: len(PICTURE) // 2]) as image, pytest.raises(UndecodableImage):
            await pool.write_patches(image, PLAN, RUN)
        with stored(PICTURE) as image:
            await pool.write_patches(image, PLAN, RUN)
        assert pool.num_replaced == 0

    run_pool(use, max_image_pixels=10_000)


SLOW = encoded(Image.new("L", (9000, 7000)), compress_level=1)
SLOW_PLAN = plan_of(9000, 7000)
SLOW_RUN = Run(0, SLOW_PLAN.patches)


ENDLESS = with_scans(20_000)
ENDLESS_PLAN = plan_image(3000, 3000, PROCESSOR, (256,), "downscale")
ENDLESS_RUNS = [Run(index * ENDLESS_PLAN.patches, ENDLESS_PLAN.patches) for index in range(2)]


@both_loops
def test_decode_past_its_deadline_is_killed_and_replaced(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "_STALLED_SHARE", 0.001)  # the machine may be busy

    async def use(pool: DecoderPool, slab: Slab) -> None:
        [pid] = pool.pids
        with stored(ENDLESS) as image, pytest.raises(DecodeTimeout) as caught:
            await pool.write_patches(image, ENDLESS_PLAN, ENDLESS_RUNS[0])
        assert caught.value.numbers == {"limit_s": 0.5}
        assert not is_child(pid)
        with stored(PICTURE) as image:
            await pool.read_header(image)
        assert pid not in pool.pids and pool.num_replaced == 1

    run_pool(use, loop=loop, decode_timeout_s=0.5)


@pytest.mark.parametrize("share", [0.1, 0.0], ids=["by its CPU", "by its state"])
def test_a_process_that_somebody_stopped_costs_no_task(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "_STALLED_SHARE", share)

    async def use(pool: DecoderPool, slab: Slab) -> None:
        with stored(PICTURE) as image, json_body(b'{"images": ["QUJD"]}') as body:
            for num_replaced, call in enumerate((pool.write_patches(image, PLAN, RUN), pool.unpack(body, "encode"))):
                [pid] = pool.pids
                os.kill(pid, signal.SIGSTOP)
                result = await call
                assert pool.num_replaced == num_replaced + 1 and not is_child(pid)
            result.close()
        assert slab.pixels(RUN).any()

    run_pool(use, decode_timeout_s=2)


def test_who_finds_no_process_that_works_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "_STALLED_SHARE", 2)  # more than there can be: each one looks starved

    async def use(pool: DecoderPool, slab: Slab) -> None:
        with stored(ENDLESS) as image:
            task = await begin(pool.write_patches(image, ENDLESS_PLAN, ENDLESS_RUNS[0]))
            await until(lambda: pool.num_replaced == 3 or task.done(), timeout_s=40)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    run_pool(use, decode_timeout_s=0.2)


def test_slow_pictures_leave_a_process_to_the_others() -> None:
    async def use(pool: DecoderPool, slab: Slab) -> None:
        with stored(ENDLESS) as slow, stored(PICTURE) as image:
            assert (await pool.read_header(slow)).is_slow and not (await pool.read_header(image)).is_slow
            work = [await begin(pool.write_patches(slow, ENDLESS_PLAN, run, is_slow=True)) for run in ENDLESS_RUNS]
            for _ in range(9):
                await pool.write_patches(image, PLAN, RUN)
            assert not any(task.done() for task in work) and pool.num_replaced == 0
            await end_unanswered(pool, work)

    run_pool(use, processes=2, decode_timeout_s=600)


def test_a_picture_whose_header_took_long_is_known_to_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(pool: DecoderPool, slab: Slab) -> None:
        with stored(with_chunks(PICTURE, 50_000)) as long, stored(PICTURE) as image:
            header = await pool.read_header(long)
            monkeypatch.setattr(header_module, "SLOW_S", header.cpu_s / 2)
            assert header.is_slow and not (await pool.read_header(image)).is_slow

    run_pool(use)


def test_pictures_that_turn_out_slow_give_way_where_all_processes_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "_QUICK_CPU_S", 0.2)

    async def use(pool: DecoderPool, slab: Slab) -> None:
        pids = set(pool.pids)
        with stored(ENDLESS) as slow, stored(PICTURE) as image:
            work = [await begin(pool.write_patches(slow, ENDLESS_PLAN, run)) for run in ENDLESS_RUNS]
            for _ in range(9):
                await pool.write_patches(image, PLAN, RUN)
            assert not any(task.done() for task in work)
            assert pool.num_replaced == 1 and len(pids & set(pool.pids)) == 1
            await end_unanswered(pool, work)

    run_pool(use, processes=2, decode_timeout_s=600)


def test_a_picture_that_gave_way_is_decoded_when_it_is_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "_QUICK_CPU_S", 0.2)
    short = with_scans(300)

    async def use(pool: DecoderPool, slab: Slab) -> None:
        with stored(short) as slow, stored(PICTURE) as image:
            work = [await begin(pool.write_patches(slow, ENDLESS_PLAN, run)) for run in ENDLESS_RUNS]
            await pool.read_header(image)
            await asyncio.gather(*work)
        assert np.array_equal(*(slab.pixels(run) for run in ENDLESS_RUNS))

    run_pool(use, processes=2)


def test_a_body_whose_unpacking_gave_way_is_unpacked_from_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "_QUICK_CPU_S", 0.01)
    monkeypatch.setattr(decoders, "_LOOK_AGAIN_S", 0.01)
    files = [bytes([index]) * 2**21 for index in range(20)]
    text = b'{"images": ["' + b'", "'.join(map(base64.b64encode, files)) + b'"]}'

    async def use(pool: DecoderPool, slab: Slab) -> None:
        with stored(with_scans(300)) as slow, stored(PICTURE) as image, json_body(text) as body:
            work = await begin(pool.write_patches(slow, ENDLESS_PLAN, ENDLESS_RUNS[0], is_slow=True))
            unpacking = await begin(pool.unpack(body, "encode"))
            while pool.num_replaced == 0 and not unpacking.done():
                await pool.read_header(image)
            with await unpacking as unpacked:
                found = [os.pread(file.fd, file.length, file.offset) for file in unpacked.images]
            assert pool.num_replaced == 1 and found == files
            await work

    run_pool(use, processes=2)


def test_slow_pictures_have_all_processes_while_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "_QUICK_CPU_S", 0.1)
    short = with_scans(300)

    async def use(pool: DecoderPool, slab: Slab) -> None:
        with stored(short) as slow:
            await asyncio.gather(*(pool.write_patches(slow, ENDLESS_PLAN, run) for run in ENDLESS_RUNS))
        assert pool.num_replaced == 0

    run_pool(use, processes=2)


async def end_unanswered(pool: DecoderPool, work: list[asyncio.Task[Any]]) -> None:
    await pool.stop()
    for task in work:
        with pytest.raises(NotReady):
            await task


async def kill_at_work(pool: DecoderPool) -> None:
    """Kill the one process in the middle of what it was just given, and wait for the next one."""
    num_replaced = pool.num_replaced
    await asyncio.sleep(0.05)
    os.kill(pool.pids[0], signal.SIGKILL)
    await until(lambda: pool.num_replaced > num_replaced)


@both_loops
def test_process_that_dies_in_a_task_is_the_images_fault_the_second_time(loop: str) -> None:
    async def use(pool: DecoderPool, slab: Slab) -> None:
        with stored(SLOW) as image:
            task = await begin(pool.write_patches(image, SLOW_PLAN, SLOW_RUN))
            await kill_at_work(pool)
            await task
            task = await begin(pool.write_patches(image, SLOW_PLAN, SLOW_RUN))
            for _ in range(2):
                await kill_at_work(pool)
            with pytest.raises(UndecodableImage, match="signal 9") as caught:
                await task
            assert caught.value.numbers == {"signal": 9}
            await pool.read_header(image)

    run_pool(use, loop=loop)


def test_process_that_dies_unpacking_is_the_bodys_fault_the_second_time() -> None:
    num_bytes = 24 * 2**20

    async def use(pool: DecoderPool, slab: Slab) -> None:
        with json_body(b'{"images": ["' + base64.b64encode(bytes(num_bytes)) + b'"]}') as body:
            task = await begin(pool.unpack(body, "encode"))
            await kill_at_work(pool)
            with await task as unpacked:
                assert [image.length for image in unpacked.images] == [num_bytes]
            task = await begin(pool.unpack(body, "encode"))
            for _ in range(2):
                await kill_at_work(pool)
            with pytest.raises(InvalidRequest, match="signal 9"):
                await task

    run_pool(use)


def test_process_that_dies_idle_costs_no_task() -> None:
    async def use(pool: DecoderPool, slab: Slab) -> None:
        [pid] = pool.pids
        os.kill(pid, signal.SIGKILL)
        wait_until_dead(pid)
        with stored(PICTURE) as image:
            await pool.read_header(image)
        assert pool.num_replaced == 1

    run_pool(use)


@both_loops
def test_cancelled_call_returns_only_when_its_process_is_done(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "_UNWANTED_S", 600)

    async def use(pool: DecoderPool, slab: Slab) -> None:
        [pid] = pool.pids
        os.kill(pid, signal.SIGSTOP)
        with stored(PICTURE) as image:
            task = await begin(pool.write_patches(image, PLAN, RUN))
            for _ in range(2):
                task.cancel()
                await asyncio.wait([task], timeout=0.05)
                assert not task.done()
            assert not slab.pixels(RUN).any()
            os.kill(pid, signal.SIGCONT)
            with pytest.raises(asyncio.CancelledError):
                await task
            assert slab.pixels(RUN).any()
            await pool.read_header(image)
        assert pool.pids == [pid]

    run_pool(use, loop=loop)


@both_loops
def test_cancelled_call_ends_its_process_soon(loop: str) -> None:
    async def use(pool: DecoderPool, slab: Slab) -> None:
        [pid] = pool.pids
        with stored(ENDLESS) as image:
            task = await begin(pool.write_patches(image, ENDLESS_PLAN, ENDLESS_RUNS[0]))
            for _ in range(2):
                task.cancel()
                await asyncio.sleep(0)
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not is_child(pid)
            with stored(PICTURE) as other:
                await pool.read_header(other)
        assert pool.num_replaced == 1

    run_pool(use, loop=loop, decode_timeout_s=600)


def test_waiting_for_a_process_is_cancelled_at_once() -> None:
    async def use(pool: DecoderPool, slab: Slab) -> None:
        [pid] = pool.pids
        os.kill(pid, signal.SIGSTOP)
        with stored(PICTURE) as image:
            busy = await begin(pool.read_header(image))
            waiting = await begin(pool.read_header(image))
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert not busy.done()
            os.kill(pid, signal.SIGCONT)
            await busy
            await pool.read_header(image)

    run_pool(use)


def test_stop_answers_running_and_waiting_calls() -> None:
    async def use(pool: DecoderPool, slab: Slab) -> None:
        os.kill(pool.pids[0], signal.SIGSTOP)
        with stored(PICTURE) as image:
            tasks = [await begin(pool.read_header(image)) for _ in range(3)]
            await pool.stop()
            for task in tasks:
                with pytest.raises(NotReady):
                    await task

    run_pool(use)


def test_process_that_cannot_start_fails_the_start(capfd: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        slab = Slab.create(LAYOUT)
        other = SimpleNamespace(fd=slab.fd, layout=SlabLayout(8, 588, 64))
        pool = DecoderPool(PROCESSOR, Settings(), other)  # type: ignore[arg-type]
        with pytest.raises(DecoderStartError, match="exit code 1"):
            await pool.start()
        assert pool.pids == []
        slab.close()

    asyncio.run(main())
    assert "SlabError" in capfd.readouterr().err


def test_each_request_is_read_under_its_own_limits() -> None:
    async def use(pool: DecoderPool, slab: Slab) -> None:
        [pid] = pool.pids
        with stored(PICTURE) as image:
            few = LimitSettings(max_image_pixels=80 * 50 - 1, max_body_bytes=2**20)
            for limits in (pool.limits, few, pool.limits):
                with nullcontext() if limits is not few else pytest.raises(ImageTooLarge):
                    await DecoderPool.read_header(pool, image, limits)
                (line,) = [line for line in read_proc(pid, "limits").splitlines() if line.startswith("Max data size")]
                assert int(line.split()[3]) == decoders.max_memory_bytes(limits)

    run_pool(use)


def test_processes_ignore_the_signals_of_the_terminal_and_are_expendable() -> None:
    async def use(pool: DecoderPool, slab: Slab) -> None:
        [pid] = pool.pids
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(pid, number)
        with stored(PICTURE) as image:
            await pool.read_header(image)
        assert pool.pids == [pid]
        assert read_proc(pid, "oom_score_adj").strip() == "500"
        assert "Max data size             unlimited" not in read_proc(pid, "limits")

    run_pool(use)


FRONT_END = """
import asyncio, sys; sys.path.append("tests")
from tests.service.test_decoders import *

async def main():
    pool = DecoderPool(PROCESSOR, Settings(), Slab.create(LAYOUT))
    await pool.start()
    print(*pool.pids, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_killed_front_end_leaves_no_process() -> None:
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", FRONT_END], cwd=root, stdout=subprocess.PIPE) as front_end:
        assert front_end.stdout is not None
        pids = [int(pid) for pid in front_end.stdout.readline().split()]
        assert len(pids) >= 2
        ends = [os.pidfd_open(pid) for pid in pids]
        front_end.kill()
    for end in ends:
        assert select.select([end], [], [], 10)[0], "a decode process outlives its front-end"
        os.close(end)


def test_unpack_gives_images_and_options() -> None:
    async def use(pool: DecoderPool, slab: Slab) -> None:
        picture = base64.b64encode(PICTURE).decode()
        text = f'{{"input": ["QUJD", {{"image": "data:;base64,{picture}"}}], "pooling": "none"}}'
        with json_body(text.encode()) as body, await pool.unpack(body, "embeddings") as unpacked:
            first, second = unpacked.images
            assert os.pread(first.fd, first.length, first.offset) == b"ABC"
            assert (await pool.read_header(second)).width == 80
            assert unpacked.options is not None and unpacked.options.pooling == "none"
        with json_body(b'{"images": ["QUJD"]}') as body, await pool.unpack(body, "encode") as unpacked:
            assert len(unpacked.images) == 1 and unpacked.options is None

    run_pool(use)


def test_unpack_gives_chunks_their_frames() -> None:
    async def use(pool: DecoderPool, slab: Slab) -> None:
        text = b'{"images": ["QQ", {"type": "video_chunk", "frames": ["QUI", "QUJD"]}, "QUI"]}'
        with json_body(text) as body, await pool.unpack(body, "encode", max_frames=4) as unpacked:
            assert unpacked.names == ("[0]", "[1].frames[0]", "[1].frames[1]", "[2]")
            first, chunk, last = unpacked.items(unpacked.images)
            assert isinstance(chunk, VideoChunk)
            files = [os.pread(file.fd, file.length, file.offset) for file in chunk.frames]
            assert files == [b"AB", b"ABC"]
            assert (first, last) == (unpacked.images[0], unpacked.images[3])
        too_long = text.replace(b'"QUI", "QUJD"', b'"QUI", "QUI", "QUI"')
        with json_body(too_long) as body, pytest.raises(TooManyFrames) as caught:
            await pool.unpack(body, "encode", max_frames=2)
        assert (caught.value.param, caught.value.numbers) == ("images[1]", {"num_frames": 3, "limit": 2})

    run_pool(use)


def test_frames_are_written_into_one_run() -> None:
    frames = [noise(80, 50), noise(80, 50).transpose(Image.Transpose.ROTATE_180)]
    plan = plan_image(80, 50, PROCESSOR, (512,), "refuse", num_frames=2)
    expected = np.zeros((plan.patches, 588), np.uint8)
    for number, frame in enumerate(frames):
        write_patches(encoded(frame), plan, PROCESSOR, orientation="apply", gray16="scale", out=expected, frame=number)

    async def use(pool: DecoderPool, slab: Slab) -> None:
        run = Run(200, plan.patches)
        with stored(encoded(frames[0])) as first, stored(encoded(frames[1])) as second:
            await asyncio.gather(pool.write_patches(second, plan, run, 1), pool.write_patches(first, plan, run, 0))
        assert np.array_equal(slab.pixels(run), expected)

    run_pool(use, processes=2)


def test_unpack_errors_keep_param_and_numbers() -> None:
    async def use(pool: DecoderPool, slab: Slab) -> None:
        with json_body(b'{"images": ["QUJD", "http://x"]}') as body, pytest.raises(InvalidRequest) as refused:
            await pool.unpack(body, "encode")
        assert refused.value.param == "images[1]"
        with json_body(b'{"images": ["QUJD", "QUJD", "QUJD"]}') as body, pytest.raises(TooManyImages) as caught:
            await pool.unpack(body, "encode")
        assert caught.value.numbers == {"num_images": 3, "limit": 2}

    run_pool(use, max_images_per_request=2)


def test_large_json_body_does_not_hold_the_loop() -> None:
    async def use(pool: DecoderPool, slab: Slab) -> None:
        data = bytes(48 * 2**20 - 12)
        lags: list[float] = []

        async def watch() -> None:
            while True:
                started = time.monotonic()
                await asyncio.sleep(0.01)
                lags.append(time.monotonic() - started - 0.01)

        with json_body(b'{"images": ["' + base64.b64encode(data) + b'"]}') as body:
            watcher = await begin(watch())
            with await pool.unpack(body, "encode") as unpacked:
                assert unpacked.images[0].length == len(data)
            watcher.cancel()
        assert max(lags) < 1

    run_pool(use)
