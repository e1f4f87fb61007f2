"""The contenders of `tpvision bench tower` with their ranks: torchrun groups, started, told what to run, and ended.

The ranks are `tp.bench.rank`, in torchrun groups as a service has them, each with a socket to this process.
"""

import contextlib
import math
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from service.bench.contenders import Contender
from service.bench.report import BenchError
from service.launcher import rank_environ, torchrun_command
from service.modes import ModeChooser
from tp.bench.messages import Command, Forward, Hello, Products, Ran, Rates, TimeModes, Timings
from tp.modes import timing_sizes
from tp.spec import EncoderSpec

_IN_FLIGHT = 2  # batches, where one follows the other; makes a difference on a GPU only
_QUICK_S = 1.0  # a forward that took less costs nothing to repeat, and on a GPU first ones take a multiple
_START_TIMEOUT_S = 600.0
_POLL_S = 0.5
_QUIET_PROFILER = {"KINETO_LOG_LEVEL": "99"}  # torch's writes lines of its own to standard error
_LAST_WORDS_S = 10.0  # for torchrun to say why a rank failed


@dataclass(frozen=True, slots=True)
class Lap:
    """One run of one contender: seconds of a forward, and the growth of its largest rank."""

    seconds: float
    num_forwards: int
    peak_growth_bytes: int | None


class Entrant:
    """A contender whose ranks are loaded and wait. `rate` is its latest, in FLOP/s."""

    def __init__(self, contender: Contender, groups: Sequence[Sequence["_Rank"]]) -> None:
        self.contender = contender
        self.ranks = [rank for group in groups for rank in group]
        self.rate = 0.0
        self._groups = groups

    @property
    def num_gpus(self) -> int:
        """One a rank; on CPU all share the cores, which count once."""
        return 1 if self.ranks[0].hello.device == "CPU" else len(self.ranks)

    def warm_up(self, patches: Sequence[int], flops: int) -> None:
        """Run the batch once, for its rate; where that was quick once more, as the first one set things up."""
        span_s = _span_s(self._forward(patches))
        if span_s < _QUICK_S:
            span_s = _span_s(self._forward(patches))
        self.rate = flops / span_s

    def lap(self, patches: Sequence[int], flops: int, run_s: float) -> Lap:
        """Run the batch as often as fills `run_s`: a lone image for what it takes, several as under load."""
        times = math.ceil(run_s * self.rate / flops)
        ran = self._forward(patches, times=times, in_flight=1 if len(patches) == 1 else _IN_FLIGHT)
        held = [rank.hello.resident_bytes for rank in self.ranks]
        growths = [
            None if one.peak_bytes is None else one.peak_bytes - before for one, before in zip(ran, held, strict=True)
        ]
        return Lap(_span_s(ran) / times, times, largest(growths))

    def count_tensors(self, patches: Sequence[int]) -> int | None:
        """The most bytes of tensors that a rank holds beside its weights."""
        return largest([ran.torch_peak_bytes for ran in self._forward(patches, counts_memory=True)])

    def multiply(self, patches: int, seconds: float) -> Rates:
        """A block's matrix products in the first rank, each for so long."""
        rank = self.ranks[0]
        rank.send(Products(patches=patches, seconds=seconds))
        return Rates.model_validate_json(rank.receive())

    def fit_chooser(self, spec: EncoderSpec) -> ModeChooser:
        """A mode chooser, as a service has it when its ranks are ready and no batch was run."""
        chooser = ModeChooser(spec, self.contender.world_size)
        smallest_tier = self.contender.settings.capacity.patch_capacities[0]
        for rank in self.ranks:
            rank.send(TimeModes(sizes=timing_sizes(smallest_tier, self.contender.world_size)))
        answers = [Timings.model_validate_json(rank.receive()) for rank in self.ranks]
        chooser.learn([answer.timings for answer in answers])  # as a dispatcher does
        return chooser

    def _forward(
        self, patches: Sequence[int], *, times: int = 1, in_flight: int = 1, counts_memory: bool = False
    ) -> list[Ran]:
        """Run the batch on all copies at once; what each rank says."""
        size, mode = len(patches) // len(self._groups), self.contender.mode
        for index, group in enumerate(self._groups):
            part = tuple(patches[index * size : (index + 1) * size])
            command = Forward(patches=part, mode=mode, times=times, in_flight=in_flight, counts_memory=counts_memory)
            for rank in group:
                rank.send(command)
        return [Ran.model_validate_json(rank.receive()) for rank in self.ranks]


class _Rank:
    """Our end of the socket to one rank."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        self._name = name
        self._lines = connection.makefile("rw")
        self.hello = Hello.model_validate_json(self.receive())

    def send(self, command: Command) -> None:
        try:
            print(command.model_dump_json(), file=self._lines, flush=True)
        except OSError as error:
            raise BenchError(f"a rank of {self._name} is gone") from error

    def receive(self) -> str:
        line = self._lines.readline()
        if not line:
            raise BenchError(f"a rank of {self._name} ended")
        return line

    def close(self) -> None:
        self._lines.close()


@contextlib.contextmanager
def entered(contender: Contender) -> Iterator[Entrant]:
    """Start the contender's groups; end them afterwards. Raises BenchError when one does not start."""
    with contextlib.ExitStack() as stack:
        groups = [stack.enter_context(_started(contender, index)) for index in range(contender.copies)]
        yield Entrant(contender, groups)


@contextlib.contextmanager
def _started(contender: Contender, group: int) -> Iterator[list[_Rank]]:
    """One torchrun group, with the ranks in their order."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tpvision-bench-")))
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(str(folder / "socket"))
        listener.listen()
        flags = ["--socket", str(folder / "socket"), "--kernels", contender.kernels]
        command = torchrun_command(contender.settings, folder, "tp.bench.rank", *flags)
        environ = {**rank_environ(contender.settings, group), **_QUIET_PROFILER}
        process = stack.enter_context(_running(command, environ))
        ranks = []
        for _ in range(contender.world_size):
            connection = stack.enter_context(_accept(listener, process, contender.name))
            ranks.append(_Rank(connection, contender.name))
            stack.callback(ranks[-1].close)
        yield sorted(ranks, key=lambda rank: rank.hello.rank)


@contextlib.contextmanager
def _running(command: Sequence[str], environ: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has its sockets closed by then, and so ends by itself; or is ended."""
    process = subprocess.Popen(
        command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield process
    except KeyboardInterrupt:
        process.kill()
        raise
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_LAST_WORDS_S)
        process.kill()  # its ranks die with it
        process.wait()


def _accept(listener: socket.socket, process: subprocess.Popen[bytes], name: str) -> socket.socket:
    listener.settimeout(_POLL_S)
    for _ in range(round(_START_TIMEOUT_S / _POLL_S)):
        with contextlib.suppress(TimeoutError):
            connection, _ = listener.accept()
            connection.setblocking(True)
            return connection
        if process.poll() is not None:
            raise BenchError(f"{name} did not start: torchrun ended with status {process.returncode}")
    raise BenchError(f"{name} did not start within {_START_TIMEOUT_S:g} s")


def _span_s(ran: Sequence[Ran]) -> float:
    """From the first rank's start to the last one's end."""
    return max(one.ended_s for one in ran) - min(one.started_s for one in ran)


def largest(sizes: Sequence[int | None]) -> int | None:
    """The largest of the sizes that are known; None where none is."""
    known = [size for size in sizes if size is not None]
    return max(known, default=None)
