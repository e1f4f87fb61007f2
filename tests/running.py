"""A real service in a process of its own, for tests; and where the test data lies."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from service.record import STAGES

ROOT = Path(__file__).parents[1]
DATA = ROOT / "tests" / "data"
GOLDEN = DATA / "golden"
START_TIMEOUT_S = 90.0
OWN_STAGES = [stage for stage in STAGES if stage != "coalesce"]  # of a request that waits for no other one
COMMAND = (sys.executable, "-m", "service")


class RunningService:
    """A `tpvision serve` process of its own, ready to answer; `log` grows as it writes."""

    started: ClassVar[list["RunningService"]] = []

    def __init__(
        self,
        arguments: list[str],
        environ: dict[str, str] | None = None,
        command: Sequence[str] = COMMAND,
        subcommand: str = "serve",
    ) -> None:
        command = [*command, subcommand, "--port", "0", "--device", "cpu", *arguments]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **(environ or {})}, stderr=subprocess.PIPE, text=True
        )
        self.log: list[str] = []
        self.url = ""
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read_log)
        self._reader.start()
        self.started.append(self)

    def wait_ready(self) -> "RunningService":
        if not self._ready.wait(START_TIMEOUT_S) or not self.url:
            self.stop()
            pytest.fail("the service did not become ready:\n" + "".join(self.log))
        self.client = httpx.Client(base_url=self.url, timeout=120, trust_env=False)
        return self

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            code = self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self._reader.join(10)
        assert self.process.stderr is not None
        self.process.stderr.close()
        if hasattr(self, "client"):
            self.client.close()
        return code

    @property
    def requests(self) -> list[dict[str, Any]]:
        """The log's lines about requests, oldest first."""
        lines = [json.loads(line) for line in self.log if line.startswith("{")]
        return [line for line in lines if line["event"] == "request"]

    def scrape(self) -> "Scrape":
        answer = self.client.get("/metrics")
        assert answer.status_code == 200, answer.text
        return Scrape(answer.text)

    def encode(self, content: bytes, **query: str) -> httpx.Response:
        return self.client.post("/v1/encode", content=content, params=query)

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(r"ready at (http://\S+):", line):
                self.url = found[1]
                self._ready.set()
        self._ready.set()  # it ended: whoever waits looks at `url`


class Scrape:
    """One look at /metrics."""

    def __init__(self, text: str) -> None:
        self.families = list(text_string_to_metric_families(text))
        self.samples = [sample for family in self.families for sample in family.samples]

    def value(self, name: str, **labels: str) -> float:
        """The sum of the samples that have this name and these labels among theirs; 0 where there is none."""
        return sum(
            sample.value
            for sample in self.samples
            if sample.name == f"tpvision_{name}" and labels.items() <= sample.labels.items()
        )


REFERENCE_IMAGES = {"TPVISION_IMAGE__ORIENTATION": "ignore", "TPVISION_IMAGE__GRAY16": "reference"}


def metadata_of(answer: httpx.Response) -> dict[str, str]:
    """`__metadata__` of a safetensors answer."""
    length = int.from_bytes(answer.content[:8], "little")
    return json.loads(answer.content[8 : 8 + length])["__metadata__"]  # type: ignore[no-any-return]


def images_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The geometry list of a safetensors answer."""
    assert answer.status_code == 200, answer.text
    return json.loads(metadata_of(answer)["images"])  # type: ignore[no-any-return]


def descendants(pid: int) -> list[int]:
    """All living processes below `pid`, by /proc."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
        except OSError:
            continue
        if not fields["State"].startswith("Z"):
            parents[int(fields["Pid"])] = int(fields["PPid"])
    found: list[int] = []
    frontier = [pid]
    while frontier:
        frontier = [child for child, parent in parents.items() if parent in frontier]
        found += frontier
    return found


def wait_until(condition: Callable[[], bool], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


async def until(condition: Callable[[], bool], timeout_s: float = 10) -> None:
    """`wait_until` on a loop."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def catches_sigterm(pid: int) -> bool:
    """Whether a process has a handler for it."""
    return _has_signal(pid, "SigCgt", signal.SIGTERM)


def holds_back_sighup(pid: int) -> bool:
    """Whether a process has it blocked, for later."""
    return _has_signal(pid, "SigBlk", signal.SIGHUP)


def ignores_sighup(pid: int) -> bool:
    """Whether a process never hears of it."""
    return _has_signal(pid, "SigIgn", signal.SIGHUP)


def _has_signal(pid: int, mask: str, number: int) -> bool:
    """By a mask of proc(5)."""
    fields = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(fields[mask], 16) >> (number - 1) & 1)


def ranks_of(service: RunningService) -> list[int]:
    """The pids of the service's ranks, oldest first."""
    return ranks_below(service.process.pid)


def ranks_below(pid: int) -> list[int]:
    """The pids of the ranks below a process, oldest first."""
    return sorted(found for found in descendants(pid) if _argument_of(found, 2) == "tp.worker")


def torchrun_of(service: RunningService) -> int:
    """The pid of the first group's torchrun."""
    return min(pid for pid in descendants(service.process.pid) if _argument_of(pid, 1) == "tp.launch")


def decoders_of(service: RunningService) -> list[int]:
    """The pids of the service's decode processes."""
    return [pid for pid in descendants(service.process.pid) if _argument_of(pid, 1) == "service.decode_process"]


def _argument_of(pid: int, skipped: int) -> str:
    """What follows `-m` on a process's command line, `skipped` words after the interpreter."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return words[skipped + 1].decode() if len(words) > skipped + 1 else ""


def assert_balanced(service: RunningService) -> None:
    """Every accepted request was answered or its client has gone, and nothing is held any more."""
    capacity = service.client.get("/v1/capacity").json()
    requests, in_flight = capacity["requests"], capacity["in_flight"]
    assert requests["accepted"] == requests["answered"] + requests["client_gone"], requests
    assert in_flight["free_patches"] == capacity["slab"]["patches"], in_flight
    assert in_flight["queued_images"] == 0 and in_flight["bytes"] == 0, in_flight


def resident_bytes(pid: int) -> int:
    """RssAnon of a process."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024
