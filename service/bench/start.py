"""`tpvision bench start`: how long a service takes until it is ready, against the least that it could take.

That is a bare torchrun group of as many ranks up to its first all-reduce, twice the time to read the weights' files,
and one forward of the smallest tier, all measured in the same run with the files in the page cache.
"""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import httpx

from service.bench.findings import COLUMNS, Finding
from service.bench.load import parse_stages
from service.bench.pictures import jpeg
from service.bench.report import BenchError, Header, Report
from service.bench.served import Served
from service.bench.usage import Watched, undisturbed, worst
from service.launcher import rank_environ, torchrun_command
from tp.checkpoint import read_vision_tensors
from tp.process import adopt_orphans
from tp.settings import Settings
from tp.spec import Grid, read_spec

_TARGET = 1.3
_READS = 2
_BLOCK_BYTES = 2**24
_REQUEST_TIMEOUT_S = 600.0
_PATCH = 14  # pixels a side


def bench_start(settings: Settings, *, rounds: int, on_step: Callable[[str], None] = lambda step: None) -> Report:
    """Start, break and stop the service of `settings` so many times. Raises BenchError when one does not start."""
    header = Header.of_this_machine()
    adopt_orphans()  # ranks of a killed torchrun: their CPU would be counted as others'
    _read_s(settings)  # from here on they are in the page cache
    bare, reads, starts = [], [], []
    for number in range(1, rounds + 1):
        on_step(f"round {number}: reading the weights, and a bare group")
        reads.append(undisturbed(partial(_read_s, settings)))
        bare.append(undisturbed(partial(_bare_s, settings)))
        on_step(f"round {number}: the service, and again after a killed rank")
        starts.append(undisturbed(partial(_start, settings)))
    least = {
        "bare group to its first all-reduce": _median(bare),
        "reading the weights' files once": _median(reads),
        "forward of the smallest tier": median(start.result.forward_s for start in starts),
    }
    bare_s, read_s, forward_s = least.values()
    reference_s = bare_s + _READS * read_s + forward_s
    noise = worst([*bare, *reads, *starts])
    measured = {
        "start to ready": median(start.result.ready_s for start in starts),
        "killed rank to ready": median(start.result.again_s for start in starts),
    }
    rows = [
        *(Finding(what, seconds, "s") for what, seconds in least.items()),
        *(
            Finding(
                what,
                seconds,
                "s",
                reference=reference_s,
                reference_what=f"bare group + {_READS} x reading + forward",
                target=_TARGET,
                others_share=noise.others_share,
                is_disturbed=noise.is_disturbed,
            )
            for what, seconds in measured.items()
        ),
    ]
    notes = (
        f"Medians of {rounds} round(s), {settings.parallel.tensor} rank(s), {settings.model.dtype}; files in the page "
        "cache. The service counts from the start of its front-end process, or from the kill.",
    )
    return Report("tpvision bench start", header, COLUMNS, rows, notes)


@dataclass(frozen=True, slots=True)
class _Start:
    ready_s: float
    forward_s: float
    again_s: float


def _start(settings: Settings) -> _Start:
    grid = Grid.squarest(settings.capacity.patch_capacities[0])
    with Served(settings) as served:
        ready_s = served.start_s
        forward_s = _forward_s(served.url, jpeg(_PATCH * grid.w, _PATCH * grid.h))
        os.kill(served.ranks()[-1], signal.SIGKILL)
        return _Start(ready_s, forward_s, served.wait_until_ready_again())


def _forward_s(url: str, picture: bytes) -> float:
    answer = httpx.post(f"{url}/v1/encode", content=picture, timeout=_REQUEST_TIMEOUT_S, trust_env=False)
    if answer.status_code != 200:
        raise BenchError(f"a picture of the smallest tier was answered {answer.status_code}: {answer.text}")
    return parse_stages(answer.headers["server-timing"])["forward"]


def _bare_s(settings: Settings) -> float:
    """From launch to the first all-reduce's end."""
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tpvision-bench-") as folder:
        command = torchrun_command(settings, Path(folder), "tp.bench.bare_group")
        process = subprocess.Popen(command, env=rank_environ(settings, 0), stdout=subprocess.PIPE)
        assert process.stdout is not None
        with process, process.stdout:
            line = process.stdout.readline()
            joined_s = time.monotonic() - started_s
    if not line or process.returncode != 0:
        raise BenchError(f"the bare group ended with status {process.returncode}")
    return joined_s


def _read_s(settings: Settings) -> float:
    """All files that hold vision tensors, once, in blocks."""
    assert settings.model.path is not None, "the command names a folder"
    files = {entry.file for entry in read_vision_tensors(settings.model.path, read_spec(settings.model.path)).values()}
    block = bytearray(_BLOCK_BYTES)
    started_s = time.monotonic()
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass
    return time.monotonic() - started_s


def _median(runs: Iterable[Watched[float]]) -> float:
    return median(run.result for run in runs)
