"""A `tpvision serve` process of its own, started for a benchmark, and what it uses.

It ends with the benchmark, whatever ends that. `service.bench.http`, `front_end` and `start` run it.
"""

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Self

from service.bench.report import BenchError
from service.bench.usage import family
from service.launcher import settings_environ
from tp.settings import ENV_PREFIX, Settings

_START_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 30.0
_SHOWN_LINES = 20
_RUN = (
    "import sys; from tp.process import die_with_parent; die_with_parent(int(sys.argv.pop(1))); "
    "from service.__main__ import main; main()"
)


class Served:
    """A front-end that was started; `url` waits until it is ready."""

    def __init__(self, settings: Settings) -> None:
        """Of `settings`, the address, which is a free one on loopback, and the log level do not count."""
        command = [sys.executable, "-c", _RUN, str(os.getpid()), "serve"]
        self._started_s = self._ready_s = time.monotonic()
        self._process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", "0"],
            env={**settings_environ(settings), f"{ENV_PREFIX}SERVER__LOG_LEVEL": "info"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._log: deque[str] = deque(maxlen=_SHOWN_LINES)
        self._url = ""
        self._has_url = threading.Event()
        self._back: queue.SimpleQueue[float | None] = queue.SimpleQueue()  # when a group was ready again; None: never
        self._reader = threading.Thread(target=self._read_log)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        assert self._process.stderr is not None
        self._process.stderr.close()

    @property
    def pid(self) -> int:
        """Of the front-end process."""
        return self._process.pid

    @property
    def url(self) -> str:
        """Where it answers, once it is ready. Raises BenchError, with its log, when it ended or took too long."""
        if not self._has_url.wait(_START_TIMEOUT_S) or not self._url:
            raise BenchError("the service did not become ready:\n" + "".join(self._log))
        return self._url

    @property
    def start_s(self) -> float:
        """From its start to ready, in seconds."""
        assert self.url
        return self._ready_s - self._started_s

    def ranks(self) -> list[int]:
        """The pids of its ranks, oldest first."""
        return sorted(pid for pid in family(self.pid) if _module(pid) == b"tp.worker")

    def wait_until_ready_again(self) -> float:
        """Of a group that was just lost: how long until it serves again, in seconds. Raises BenchError.

        By the service's log: who asks /readyz all the time takes CPU from the ranks.
        """
        started_s = time.monotonic()
        with contextlib.suppress(queue.Empty):
            if (ready_s := self._back.get(timeout=_START_TIMEOUT_S)) is not None:
                return ready_s - started_s
        raise BenchError("the service did not become ready again:\n" + "".join(self._log))

    def _read_log(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._log.append(line)
            if found := re.search(r"ready at (http://\S+):", line):
                self._ready_s = time.monotonic()
                self._url = found[1]
                self._has_url.set()
            elif self._url and re.search(r"group \d+ is ready: ", line):
                self._back.put(time.monotonic())
        self._back.put(None)
        self._has_url.set()  # it ended: whoever waits looks at the URL


def _module(pid: int) -> bytes:
    """What a Python process was told to run with its first -m."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return b""
    return words[words.index(b"-m") + 1] if b"-m" in words[:-1] else b""
