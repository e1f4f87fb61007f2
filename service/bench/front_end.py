"""`tpvision bench front-end`: what lies around the encoder, and what it costs.

    body -> rows          CPU of the decode processes and of their parent, against bare Pillow on the same JPEG
    rows -> last byte     a large result over loopback, against a copy of it in memory, and a server that only sends
    HTTP in -> HTTP out   what is added to the stages, with a tiny encoder
    ceiling               requests and bytes a second of one front-end process

The last but one runs real ranks. Where the encoder would be in the way, `tp.bench.null_rank` stands in for it: it does
nothing, and the front-end cannot tell.
"""

import asyncio
import contextlib
import io
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import uvloop
from PIL import Image

from service.bench.findings import COLUMNS, Finding
from service.bench.http import Row, Run, Size, Target, Traffic, row_of, run_load, warm_up
from service.bench.load import Outcome
from service.bench.pictures import jpeg
from service.bench.report import BenchError, Header, Report, quantile
from service.bench.served import Served
from service.bench.usage import Watched, cpu_s, undisturbed, worst
from service.body import Body
from service.decoders import DecoderPool
from service.demo_model import demo_config, demo_preprocessor_config, write_demo_model
from service.geometry import ImagePlan, plan_image
from service.launcher import settings_environ
from tp.process import resident_bytes
from tp.settings import Settings, load_settings
from tp.slab import Run as Rows
from tp.slab import Slab, SlabLayout
from tp.spec import ITEMSIZE, EncoderSpec, parse_spec

_STOP_TIMEOUT_S = 30.0
_TOP_TIER, _ALL_TIER = 16_384, 65_536
_PICTURES = ((900, 700, _TOP_TIER), (4000, 3000, _TOP_TIER), (4000, 3000, _ALL_TIER))  # pixels, and the top tier
_ROUNDS = 3
_AT_ONCE = 2
_SMALL, _MEDIUM, _LARGE = Size(56, 56, 1), Size(224, 224, 1), Size(1792, 1792, 1)  # 16, 256 and 16,384 patches
_AFTER_ROWS = ("copy", "encode_response")  # the stages that begin when tokens are in the slab
_ASKED_RATE = 500.0  # small requests a second
_SMALL_CONNECTIONS = 32
_LARGE_CONNECTIONS = 4

_NOTES = (
    "JPEGs over a tier are downscaled to it, as bare Pillow then does too. Where no encoder is named, a rank that does "
    "nothing stands in for one, and the front-end is all there is. Loads run over loopback, client and service on the "
    "same cores.",
)


def bench_front_end(*, seconds: float, on_step: Callable[[str], None] = lambda step: None) -> Report:
    """Every figure, each from about so many seconds of work. Raises BenchError when a service does not start."""
    header = Header.of_this_machine()
    findings: list[Finding] = []
    on_step("body to rows")
    findings += _body_to_rows(seconds)
    with _front_end_alone() as target:
        on_step("rows to last byte")
        for form in ("safetensors", "octet-stream"):
            findings += _rows_to_last_byte(target, form, seconds)
        findings.append(_sending_alone(seconds))
        on_step("the ceiling of one front-end process")
        findings += _ceiling(target, seconds)
    with _tiny_service() as target:
        on_step("the round trip")
        findings += _round_trip(target, seconds)
    return Report("tpvision bench front-end", header, COLUMNS, findings, _NOTES)


# ---- body -> rows


@dataclass(frozen=True, slots=True)
class _Filled:
    """Images whose rows were filled."""

    count: int
    cpu_s: float
    elapsed_s: float


class _Decoding:
    """The decode processes of a front-end, and a loop to use them from."""

    def __init__(self, runner: asyncio.Runner, spec: EncoderSpec, slab: Slab) -> None:
        self._runner = runner
        self._spec = spec
        settings = load_settings().settings
        self._limits = settings.limits
        self._pool = DecoderPool(spec.processor, settings, slab)
        runner.run(self._pool.start())

    def fill(self, picture: bytes, size: tuple[int, int], tier: int, seconds: float, at_once: int = 1) -> _Filled:
        """Fill rows with the picture again and again, `at_once` at a time."""
        return self._runner.run(self._fill(picture, size, tier, seconds, at_once))

    def stop(self) -> None:
        """End the processes."""
        self._runner.run(self._pool.stop())

    async def _fill(self, picture: bytes, size: tuple[int, int], tier: int, seconds: float, at_once: int) -> _Filled:
        count = 0
        pids = [os.getpid(), *self._pool.pids]
        cpu_before_s, started_s = cpu_s(pids), time.monotonic()

        async def fill(body: Body, start: int) -> None:
            nonlocal count
            while time.monotonic() - started_s < seconds:
                await self._pool.read_header(body.image, self._limits)
                plan = _plan(self._spec, size, tier)
                await self._pool.write_patches(body.image, plan, Rows(start, plan.patches), self._limits)
                count += 1

        with contextlib.ExitStack() as stack:
            bodies = [stack.enter_context(Body()) for _ in range(at_once)]
            for body in bodies:
                body.write(picture)
            await asyncio.gather(*(fill(body, index * _ALL_TIER) for index, body in enumerate(bodies)))
        return _Filled(count, cpu_s(pids) - cpu_before_s, time.monotonic() - started_s)


def _body_to_rows(seconds: float) -> Iterator[Finding]:
    spec = parse_spec(demo_config("tiny"), demo_preprocessor_config())
    slab = Slab.create(SlabLayout.of(spec, num_patches=_AT_ONCE * _ALL_TIER, itemsize=4))
    with contextlib.closing(slab), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        decoding = _Decoding(runner, spec, slab)
        try:
            for width, height, tier in _PICTURES:
                yield _cpu_of_decoding(decoding, _plan(spec, (width, height), tier), seconds)
            yield _scaling(decoding, seconds)
        finally:
            decoding.stop()


def _cpu_of_decoding(decoding: _Decoding, plan: ImagePlan, seconds: float) -> Finding:
    picture, tier = jpeg(*plan.original_size), plan.tier
    ours: list[Watched[_Filled]] = []
    bare: list[Watched[float]] = []
    for _ in range(_ROUNDS):
        bare.append(undisturbed(partial(_bare_s, picture, plan.encoded_size, seconds / _ROUNDS)))
        ours.append(undisturbed(partial(decoding.fill, picture, plan.original_size, tier, seconds / _ROUNDS)))
    (width, height), (new_width, new_height) = plan.original_size, plan.encoded_size
    resized = "" if plan.original_size == plan.encoded_size else f" to {new_width} x {new_height}"
    return Finding(
        f"CPU from body to rows, {width} x {height}{resized}",
        1000 * median(run.result.cpu_s / run.result.count for run in ours),
        "ms",
        reference=1000 * median(run.result for run in bare),
        reference_what="bare Pillow",
        target=1.25,
        others_share=worst([*ours, *bare]).others_share,
        is_disturbed=worst([*ours, *bare]).is_disturbed,
        details={"jpeg_bytes": len(picture), "patches": plan.patches},
    )


def _scaling(decoding: _Decoding, seconds: float) -> Finding:
    (width, height, tier), *_ = _PICTURES
    picture = jpeg(width, height)
    runs: dict[int, list[Watched[_Filled]]] = {1: [], _AT_ONCE: []}
    for _ in range(_ROUNDS):
        for at_once, those in runs.items():
            those.append(
                undisturbed(partial(decoding.fill, picture, (width, height), tier, seconds / _ROUNDS, at_once))
            )
    one, several = (median(run.result.count / run.result.elapsed_s for run in those) for those in runs.values())
    return Finding(
        f"{width} x {height} to rows, {_AT_ONCE} at once",
        several,
        "images/s",
        reference=one,
        reference_what="one at a time",
        target=1.8,
        target_is="at least",
        others_share=worst(itertools.chain(*runs.values())).others_share,
        is_disturbed=worst(itertools.chain(*runs.values())).is_disturbed,
    )


def _plan(spec: EncoderSpec, size: tuple[int, int], tier: int) -> ImagePlan:
    return plan_image(*size, spec.processor, (tier,), "downscale")


def _bare_s(picture: bytes, size: tuple[int, int], seconds: float) -> float:
    """CPU seconds of Pillow's decode, and resize where the size differs."""
    count, started_s, cpu_before_s = 0, time.monotonic(), time.process_time()
    while time.monotonic() - started_s < seconds:
        with Image.open(io.BytesIO(picture)) as image:
            image.load()
            if image.size != size:
                image.resize(size, Image.Resampling.BICUBIC)
        count += 1
    return (time.process_time() - cpu_before_s) / count


# ---- over HTTP


@contextlib.contextmanager
def _front_end_alone() -> Iterator[Target]:
    """A front-end for K3's true shape, with a rank that does nothing."""
    with tempfile.TemporaryDirectory(prefix="tpvision-bench-") as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(demo_config("full")))
        (folder / "preprocessor_config.json").write_text(json.dumps(demo_preprocessor_config()))
        flags = {
            "model.path": folder,
            "parallel.workers": "external",
            "parallel.socket": folder / "control.sock",
            "capacity.patch_capacities": [1024, _TOP_TIER],
        }
        settings = load_settings(flags=flags).settings
        with _null_rank(settings), Served(settings) as served:
            yield Target.of(served)


@contextlib.contextmanager
def _null_rank(settings: Settings) -> Iterator[None]:
    """It ends when its front-end does, which must be inside the block."""
    command = [sys.executable, "-m", "tp.bench.null_rank", "--parent", str(os.getpid())]
    with subprocess.Popen(command, env=settings_environ(settings)) as process:
        try:
            yield
            process.wait(_STOP_TIMEOUT_S)
        finally:
            process.kill()


@contextlib.contextmanager
def _bare_server(num_bytes: int) -> Iterator[Target]:
    """A server that has so many bytes ready, and sends them to whoever posts."""
    command = [sys.executable, "-m", "service.bench.bare_server"]
    command += ["--parent", str(os.getpid()), "--bytes", str(num_bytes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield Target(f"http://127.0.0.1:{int(process.stdout.readline())}", process.pid)
        finally:
            process.kill()


@contextlib.contextmanager
def _tiny_service() -> Iterator[Target]:
    """The tiny demo model on two ranks."""
    with tempfile.TemporaryDirectory(prefix="tpvision-bench-") as name:
        write_demo_model(Path(name), size="tiny")
        flags = {"model.path": Path(name), "parallel.tensor": 2, "parallel.device": "cpu"}
        with Served(load_settings(flags=flags).settings) as served:
            yield Target.of(served)


def _rows_to_last_byte(target: Target, form: str, seconds: float) -> Iterator[Finding]:
    assert target.front_end is not None
    traffic = Traffic(sizes=[_LARGE], seconds=seconds, connections=1, form=form)
    warm_up(target, traffic)
    before_bytes = resident_bytes(target.front_end)
    watched = undisturbed(partial(run_load, target, traffic))
    answered = _answered(watched.result)
    num_bytes = answered[0].bytes_in
    fresh_s, warm_s = _copy_s(num_bytes, seconds)
    yield Finding(
        f"rows to last byte, {num_bytes / 1e6:.1f} MB of {form}",
        1000 * median(map(after_rows_s, answered)),
        "ms",
        reference=1000 * fresh_s,
        reference_what="a copy of it to fresh memory",
        target=1.5,
        others_share=watched.others_share,
        is_disturbed=watched.is_disturbed,
        details={
            "copy_to_touched_memory_ms": 1000 * warm_s,
            "stages_ms": {name: 1000 * median(one.stages_s[name] for one in answered) for name in answered[0].stages_s},
        },
    )
    if watched.result.front_end_peak_bytes is not None:
        yield Finding(
            f"front-end memory for it, {form}",
            (watched.result.front_end_peak_bytes - before_bytes) / 1e6,
            "MB",
            reference=num_bytes / 1e6,
            reference_what="the answer itself",
            target=1.5,  # under 2: no second copy
            others_share=watched.others_share,
        )


def after_rows_s(outcome: Outcome) -> float:
    """What was left of a request's time when its tokens were in the slab."""
    return outcome.latency_s - sum(seconds for stage, seconds in outcome.stages_s.items() if stage not in _AFTER_ROWS)


def _sending_alone(seconds: float) -> Finding:
    """What the same client waits for so large an answer when nothing but sending it is left to do."""
    spec = parse_spec(demo_config("full"), demo_preprocessor_config())
    num_tokens = _plan(spec, (_LARGE.width, _LARGE.height), _TOP_TIER).grid.num_tokens
    num_bytes = num_tokens * spec.text_hidden_size * ITEMSIZE["bfloat16"]
    traffic = Traffic(sizes=[_SMALL], seconds=seconds, connections=1)
    with _bare_server(num_bytes) as bare:
        watched = undisturbed(partial(run_load, bare, traffic))
    return Finding(
        f"{num_bytes / 1e6:.1f} MB from a server that only sends",
        1000 * median(one.latency_s for one in _answered(watched.result)),
        "ms",
        reference=1000 * _copy_s(num_bytes, seconds)[0],
        reference_what="a copy of it to fresh memory",
        others_share=watched.others_share,
        is_disturbed=watched.is_disturbed,
    )


def _ceiling(target: Target, seconds: float) -> Iterator[Finding]:
    """What a front-end gets through here, and what its own CPU would allow with a core to itself."""
    small = Traffic(sizes=[_SMALL], seconds=seconds, connections=_SMALL_CONNECTIONS)
    large = Traffic(sizes=[_LARGE], seconds=seconds, connections=_LARGE_CONNECTIONS, form="octet-stream")
    for traffic in (small, large):
        warm_up(target, traffic)
        watched = undisturbed(partial(run_load, target, traffic))
        run, row = watched.result, row_of(traffic, watched, knows_others=True)
        answered, elapsed_s, cpu_used_s = _answered(run), run.load.elapsed_s, run.front_end_cpu_s
        assert cpu_used_s is not None, "the service is ours"
        amount, unit = (
            (len(answered), "requests/s") if traffic is small else (sum(one.bytes_in for one in answered) / 1e9, "GB/s")
        )
        size = traffic.sizes[0]
        name = f"{size.width} x {size.height}, {traffic.connections} connections"
        for what, value in ((name, amount / elapsed_s), (f"{name}, by front-end CPU", amount / cpu_used_s)):
            yield Finding(
                what,
                value,
                unit,
                others_share=watched.others_share,
                is_disturbed=watched.is_disturbed,
                details=_details(row),
            )
    yield _at_rate(target, seconds, "no encoder")


def _at_rate(target: Target, seconds: float, who: str) -> Finding:
    """Small requests, open loop."""
    traffic = Traffic(sizes=[_SMALL], seconds=seconds, rate=_ASKED_RATE)
    watched = undisturbed(partial(run_load, target, traffic))
    row = row_of(traffic, watched, knows_others=True)
    return Finding(
        f"{_SMALL.width} x {_SMALL.height} answered with 200, {who}",
        len(_answered(watched.result)),
        "requests",
        reference=row.num_requests,
        reference_what=f"sent at {_ASKED_RATE:g}/s",
        target=1,
        target_is="at least",
        others_share=watched.others_share,
        is_disturbed=watched.is_disturbed,
        details=_details(row),
    )


def _round_trip(target: Target, seconds: float) -> Iterator[Finding]:
    traffic = Traffic(sizes=[_MEDIUM], seconds=seconds, connections=1)
    warm_up(target, traffic)
    watched = undisturbed(partial(run_load, target, traffic))
    added_ms = [1000 * (one.latency_s - sum(one.stages_s.values())) for one in _answered(watched.result)]
    yield Finding(
        f"HTTP in to HTTP out beyond the stages, p50, {_MEDIUM.width} x {_MEDIUM.height}, tiny demo model",
        median(added_ms),
        "ms",
        target=3,
        others_share=watched.others_share,
        is_disturbed=watched.is_disturbed,
        details={"p99_ms": quantile(added_ms, 0.99), **_details(row_of(traffic, watched, knows_others=True))},
    )
    yield _at_rate(target, seconds, "tiny demo model")


def _answered(run: Run) -> list[Outcome]:
    """The requests that got embeddings. Raises BenchError where there are none."""
    answered = [outcome for outcome in run.load.outcomes if outcome.status == 200]
    if not answered:
        raise BenchError("the service answered no request with embeddings")
    return answered


def _copy_s(num_bytes: int, seconds: float) -> tuple[float, float]:
    """A copy of that many bytes in memory: to fresh pages, and to pages that were touched before."""
    source, target = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
    fresh, warm = [], []
    started_s = time.monotonic()
    while time.monotonic() - started_s < seconds / _ROUNDS:
        before_s = time.perf_counter()
        source.copy()
        between_s = time.perf_counter()
        np.copyto(target, source)
        fresh.append(between_s - before_s)
        warm.append(time.perf_counter() - between_s)
    return median(fresh), median(warm)


def _details(row: Row) -> dict[str, object]:
    """What else a load showed."""
    return {
        "statuses": row.statuses,
        "p50_ms": None if row.p50_s is None else 1000 * row.p50_s,
        "p99_ms": None if row.p99_s is None else 1000 * row.p99_s,
        "livez_p99_ms": 1000 * row.livez_p99_s,
        "front_end_cpu_ms": None if row.front_end_cpu_s is None else 1000 * row.front_end_cpu_s,
        "client_cpu_share": row.client_cpu_share,
        "client_is_bottleneck": row.client_is_bottleneck,
    }
