"""`tpvision bench http`: a load over HTTP, open or closed loop, and what became of it.

    for each rate: load client in a process of its own | /livez polled from here | CPU and memory from the kernel

The load goes to a service that the benchmark started, or to a running one; of that one neither memory nor the CPU that
others use is known. `service.bench.load` is the client.
"""

import contextlib
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx

from service.bench.load import FAILED, Load, Outcome, Picture, Plan
from service.bench.pictures import jpeg
from service.bench.report import BenchError, Column, Header, Report, number, quantile
from service.bench.served import Served
from service.bench.usage import Watched, cpu_s, undisturbed
from tp.process import forget_peak, peak_resident_bytes

FORMS = {
    "safetensors": "application/vnd.safetensors",
    "octet-stream": "application/octet-stream",
    "npy": "application/x-npy",
    "json": "application/json",
}
_ROOT = Path(__file__).parents[2]
_CONNECTIONS = 512
_PROBE_EVERY_S = 0.02
_WARM_UP_REQUESTS = 3  # for each size
_REQUEST_TIMEOUT_S = 600.0
_BUSY_SHARE = 0.9  # of a core: a client that takes more cannot send on time
_LATE_S = 0.01  # nor one whose requests leave later than this


@dataclass(frozen=True, slots=True)
class Size:
    """Pictures of one size, in pixels, and how often they are sent beside the others."""

    width: int
    height: int
    weight: float


@dataclass(frozen=True, slots=True)
class Traffic:
    """What is sent, and what is asked for. Without a `rate`, each of `connections` waits for its answer."""

    sizes: Sequence[Size]
    seconds: float
    rate: float | None = None
    connections: int = _CONNECTIONS
    form: str = "safetensors"
    dtype: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Target:
    """Where the load goes, and the processes that can be watched there, if they are ours."""

    url: str
    front_end: int | None = None
    ranks: Sequence[int] = ()

    @classmethod
    def of(cls, served: Served) -> "Target":
        """A service that the benchmark started."""
        return cls(served.url, served.pid, served.ranks())

    @property
    def is_ours(self) -> bool:
        """Whether all of its processes are below this one."""
        return self.front_end is not None


@dataclass(frozen=True, slots=True)
class Run:
    """One load and what it did to the service. Seconds and bytes; None of a service that is not ours."""

    load: Load
    livez_s: Sequence[float]  # latencies of the probe
    front_end_cpu_s: float | None
    front_end_peak_bytes: int | None
    rank_peak_bytes: int | None


@dataclass(frozen=True, slots=True)
class Row:
    """One rate. Latencies are of answers with embeddings, from when a request was due to the last byte."""

    rate: float | None  # requests a second asked for; None: closed loop
    connections: int | None  # that each wait for their answer; None: open loop
    form: str
    dtype: str | None  # None: the form's default
    num_requests: int
    statuses: dict[str, int]  # `failed` are those without an answer
    images_per_s: float  # answered, over the whole time to the last answer
    p50_s: float | None
    p90_s: float | None
    p99_s: float | None
    stages_p50_s: dict[str, float]
    stages_p99_s: dict[str, float]
    bytes_in_per_s: float  # of answers
    bytes_out_per_s: float  # of pictures
    livez_p99_s: float  # how long the front-end's event loop keeps a probe waiting
    front_end_cpu_s: float | None  # of the front-end process, for one request
    front_end_peak_bytes: int | None  # RssAnon + RssShmem, the slab included
    rank_peak_bytes: int | None  # the same of the largest rank
    client_cpu_share: float  # of one core
    client_late_s: float  # 99th percentile of how late requests left
    client_is_bottleneck: bool  # it could not send as asked: the figures are its own
    others_share: float | None  # None where the service is not ours: it would count as others
    is_disturbed: bool

    @property
    def marks(self) -> str:
        """What a reader must know of the row."""
        return ", ".join(["disturbed"] * self.is_disturbed + ["client-bound"] * self.client_is_bottleneck)


def _milliseconds(stages_s: dict[str, float]) -> str:
    return "\n".join(f"{name} {seconds * 1000:.1f}" for name, seconds in stages_s.items())


_MS, _MEGABYTES = 1e-3, 1e6
COLUMNS = (
    Column("rate", "requests/s asked", number("{:g}")),
    Column("connections", "connections, closed loop"),
    Column("form", "form"),
    Column("dtype"),
    Column("num_requests", "requests sent"),
    Column("statuses", "answers by status", lambda counts: ", ".join(f"{n} x {name}" for name, n in counts.items())),
    Column("images_per_s", "images/s", number("{:.1f}")),
    Column("p50_s", "p50 ms", number("{:.1f}", _MS)),
    Column("p90_s", "p90 ms", number("{:.1f}", _MS)),
    Column("p99_s", "p99 ms", number("{:.1f}", _MS)),
    Column("stages_p50_s", "stages p50 ms", _milliseconds),
    Column("stages_p99_s", "stages p99 ms", _milliseconds),
    Column("bytes_in_per_s", "answers MB/s", number("{:.1f}", _MEGABYTES)),
    Column("bytes_out_per_s", "pictures MB/s", number("{:.1f}", _MEGABYTES)),
    Column("livez_p99_s", "/livez p99 ms", number("{:.1f}", _MS)),
    Column("front_end_cpu_s", "front-end CPU ms a request", number("{:.2f}", _MS)),
    Column("front_end_peak_bytes", "front-end peak MB", number("{:.0f}", _MEGABYTES)),
    Column("rank_peak_bytes", "largest rank peak MB", number("{:.0f}", _MEGABYTES)),
    Column("client_cpu_share", "client CPU", number("{:.0%}")),
    Column("client_late_s", "client late p99 ms", number("{:.1f}", _MS)),
    Column("client_is_bottleneck"),
    Column("others_share", "others' CPU", number("{:.1%}")),
    Column("is_disturbed"),
    Column("marks", "marks", in_json=False),
)
_NOTES = (
    "Open loop: Poisson arrivals, requests leave when due; latencies count from then. Client-bound: the client took "
    f"over {_BUSY_SHARE:.0%} of a core, or requests left over {_LATE_S * 1000:.0f} ms late.",
)


def bench_http(
    target: Target, traffics: Sequence[Traffic], *, on_step: Callable[[str], None] = lambda step: None
) -> Report:
    """One row for each traffic. Raises BenchError where the service does not answer."""
    header = Header.of_this_machine()
    on_step("warming up")
    warm_up(target, traffics[0])
    rows = []
    for traffic in traffics:
        on_step("closed loop" if traffic.rate is None else f"{traffic.rate:g} requests/s")
        rows.append(row_of(traffic, undisturbed(partial(run_load, target, traffic)), knows_others=target.is_ours))
    return Report("tpvision bench http", header, COLUMNS, rows, _NOTES, is_upright=False)


def run_load(target: Target, traffic: Traffic) -> Run:
    """Send it, and watch the service meanwhile. Raises BenchError when the client fails."""
    can_peak = target.is_ours and _forget_peaks(target)
    front_end = [pid for pid in (target.front_end,) if pid is not None]
    before_s = cpu_s(front_end)
    with _probing(target.url) as livez_s:
        load = _send(target, traffic)
    return Run(
        load=load,
        livez_s=livez_s,
        front_end_cpu_s=cpu_s(front_end) - before_s if front_end else None,
        front_end_peak_bytes=max(map(peak_resident_bytes, front_end)) if can_peak else None,
        rank_peak_bytes=max(map(peak_resident_bytes, target.ranks), default=None) if can_peak else None,
    )


def row_of(traffic: Traffic, watched: Watched[Run], *, knows_others: bool) -> Row:
    """What a run says, in the end."""
    run, load = watched.result, watched.result.load
    answered = [outcome for outcome in load.outcomes if outcome.status == 200]
    latencies_s = [one.sent_s - one.due_s + one.latency_s for one in answered]
    late_s = quantile([one.sent_s - one.due_s for one in load.outcomes], 0.99)
    cpu_share = load.cpu_s / load.elapsed_s
    counts = Counter(outcome.status for outcome in load.outcomes)
    return Row(
        rate=traffic.rate,
        connections=traffic.connections if traffic.rate is None else None,
        form=traffic.form,
        dtype=traffic.dtype,
        num_requests=len(load.outcomes),
        statuses={"failed" if status == FAILED else str(status): counts[status] for status in sorted(counts)},
        images_per_s=len(answered) / load.elapsed_s,
        p50_s=quantile(latencies_s, 0.5) if latencies_s else None,
        p90_s=quantile(latencies_s, 0.9) if latencies_s else None,
        p99_s=quantile(latencies_s, 0.99) if latencies_s else None,
        stages_p50_s=_stages_s(answered, 0.5),
        stages_p99_s=_stages_s(answered, 0.99),
        bytes_in_per_s=sum(outcome.bytes_in for outcome in load.outcomes) / load.elapsed_s,
        bytes_out_per_s=load.bytes_out / load.elapsed_s,
        livez_p99_s=quantile(run.livez_s, 0.99),
        front_end_cpu_s=None if run.front_end_cpu_s is None else run.front_end_cpu_s / len(load.outcomes),
        front_end_peak_bytes=run.front_end_peak_bytes,
        rank_peak_bytes=run.rank_peak_bytes,
        client_cpu_share=cpu_share,
        client_late_s=late_s,
        client_is_bottleneck=cpu_share > _BUSY_SHARE or late_s > _LATE_S,
        others_share=watched.others_share if knows_others else None,
        is_disturbed=knows_others and watched.is_disturbed,
    )


def _stages_s(outcomes: Sequence[Outcome], share: float) -> dict[str, float]:
    stages: dict[str, list[float]] = {}
    for outcome in outcomes:
        for name, seconds in outcome.stages_s.items():
            stages.setdefault(name, []).append(seconds)
    return {name: quantile(values, share) for name, values in stages.items()}


def warm_up(target: Target, traffic: Traffic) -> None:
    """A few requests of each size. Raises BenchError unless they are answered with embeddings."""
    with httpx.Client(timeout=_REQUEST_TIMEOUT_S, trust_env=False) as client:
        for size in traffic.sizes:
            for _ in range(_WARM_UP_REQUESTS):
                try:
                    answer = client.post(
                        _url(target, traffic), content=jpeg(size.width, size.height), headers=_headers(traffic)
                    )
                except httpx.TransportError as error:
                    raise BenchError(f"{target.url} does not answer: {error}") from error
                if answer.status_code != 200:
                    raise BenchError(f"{target.url} answers {answer.status_code}: {answer.text}")


def _send(target: Target, traffic: Traffic) -> Load:
    with tempfile.TemporaryDirectory(prefix="tpvision-bench-") as folder:
        pictures = []
        for size in traffic.sizes:
            file = Path(folder) / f"{size.width}x{size.height}.jpg"
            file.write_bytes(jpeg(size.width, size.height))
            pictures.append(Picture(file=file, weight=size.weight))
        plan = Plan(
            url=_url(target, traffic),
            headers=_headers(traffic),
            pictures=pictures,
            seed=traffic.seed,
            seconds=traffic.seconds,
            rate=traffic.rate,
            connections=traffic.connections,
        )
        command = [sys.executable, "-m", "service.bench.load"]
        ended = subprocess.run(
            command, cwd=_ROOT, input=plan.model_dump_json(), stdout=subprocess.PIPE, text=True, check=False
        )
    if ended.returncode != 0:
        raise BenchError(f"the load client ended with status {ended.returncode}")
    load = Load.model_validate_json(ended.stdout)
    if not load.outcomes:
        raise BenchError(f"nothing was due in {traffic.seconds:g} s")
    return load


def _url(target: Target, traffic: Traffic) -> str:
    return f"{target.url}/v1/encode" + (f"?dtype={traffic.dtype}" if traffic.dtype else "")


def _headers(traffic: Traffic) -> dict[str, str]:
    return {"accept": FORMS[traffic.form], **traffic.headers}


@contextlib.contextmanager
def _probing(url: str) -> Iterator[list[float]]:
    """Latencies of /livez, polled in a thread until the end of the block."""
    latencies_s: list[float] = []
    ended = threading.Event()

    def probe() -> None:
        with httpx.Client(base_url=url, timeout=_REQUEST_TIMEOUT_S, trust_env=False) as client:
            while not ended.is_set():
                started_s = time.monotonic()
                client.get("/livez")
                latencies_s.append(time.monotonic() - started_s)
                ended.wait(_PROBE_EVERY_S)

    thread = threading.Thread(target=probe)
    thread.start()
    try:
        yield latencies_s
    finally:
        ended.set()
        thread.join()


def _forget_peaks(target: Target) -> bool:
    """Whether peaks can be measured from here on."""
    try:
        for pid in (target.front_end, *target.ranks):
            forget_peak(pid)
    except OSError:
        return False
    return True
