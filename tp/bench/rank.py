"""One rank of a benchmark: loads its encoder once, then runs what it is told, alone or with its group.

`service.bench.entrants` starts it with torchrun, one group a contender, and keeps all of them loaded: a rank waits for
its next command in a socket and takes no CPU meanwhile. It runs the same `Runner` as a rank that serves.
"""

import argparse
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.distributed.elastic.multiprocessing.errors import record

from tp.bench.ablations import KERNELS
from tp.bench.allocated import peak_allocated_bytes
from tp.bench.messages import COMMAND, Forward, Hello, Products, Ran, Rates, TimeModes, Timings
from tp.bench.products import product_rates
from tp.kernels import Kernels
from tp.modes import assign_images
from tp.parallel import TPGroup
from tp.process import PARENT_VARIABLE, die_with_parent, forget_peak, peak_resident_bytes, resident_bytes
from tp.rank import choose_device
from tp.runner import Bytes, Pending, Runner
from tp.settings import load_settings
from tp.spec import ITEMSIZE, Grid, read_spec
from tp.weights import TORCH_DTYPES
from tp.wire import Timing


@record
def main() -> None:
    """Load, say hello, and answer commands until the socket ends."""
    die_with_parent(int(os.environ[PARENT_VARIABLE]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the benchmark, which hangs up
    parser = argparse.ArgumentParser(description="One rank of `tpvision bench tower`; started by torchrun.")
    parser.add_argument("--socket", type=Path, required=True, help="the benchmark's socket")
    parser.add_argument("--kernels", choices=KERNELS, default="fastest", help="which to use")
    arguments = parser.parse_args()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(str(arguments.socket))
        lines = connection.makefile("rw")
        rank = BenchRank(KERNELS[arguments.kernels])
        print(rank.hello().model_dump_json(), file=lines, flush=True)
        for line in lines:
            print(rank.answer(line).model_dump_json(), file=lines, flush=True)
    os._exit(0)  # as tp.rank does


class BenchRank:
    """A loaded encoder and the commands it understands. Settings come by environment, like a serving rank's."""

    def __init__(self, kernels: Kernels | None) -> None:
        """`kernels`: in place of the fastest that work here."""
        settings = load_settings(environ=os.environ).settings
        assert settings.model.path is not None, "the benchmark names the model"
        self._images: dict[int, tuple[Grid, Bytes, Bytes]] = {}
        self._spec = read_spec(settings.model.path)
        self._dtype = settings.compute_dtype(self._spec)
        device = choose_device(settings)
        if device.type == "cpu" and settings.parallel.threads is not None:
            torch.set_num_threads(settings.parallel.threads)
        self._group = TPGroup.from_environment(
            device, timeout_s=settings.collective_timeout_s, exchange=settings.parallel.exchange
        )
        self._runner = Runner.load(
            settings.model.path,
            self._spec,
            dtype=self._dtype,
            rms_norm_eps=settings.model.rms_norm_eps,
            group=self._group,
            kernels=kernels,
            resident=settings.parallel.resident,
        )
        if settings.parallel.cuda_graphs == "on":
            self._runner.capture(settings.capacity.patch_capacities)

    def hello(self) -> Hello:
        """Who this is, and what it holds before its first forward."""
        return Hello(
            rank=self._group.rank,
            pid=os.getpid(),
            device=self._describe_device(),
            threads=torch.get_num_threads(),
            weights_bytes=self._runner.memory().weights_bytes,
            resident_bytes=resident_bytes(),
            attention=self._runner.describe_attention(),
            collectives=self._group.describe_collectives(),
        )

    def answer(self, line: str) -> Ran | Timings | Rates:
        """Do what the line says."""
        command = COMMAND.validate_json(line)
        match command:
            case Forward():
                return self._forward(command)
            case TimeModes():
                return self._time_modes(command)
            case Products():
                return self._multiply(command)

    def _forward(self, command: Forward) -> Ran:
        start = self._starter_alone(command.patches) if command.mode == "dp" else self._starter(command.patches)
        torch_peak_bytes = None
        if command.counts_memory:
            torch_peak_bytes = peak_allocated_bytes(lambda: start().finish(), self._group.device)
        can_peak = self._group.device.type == "cpu" and _forget_peak()
        started_s = time.monotonic()
        running: deque[Pending] = deque()
        for _ in range(command.times):
            if len(running) == command.in_flight:
                running.popleft().finish()
            running.append(start())
        for pending in running:
            pending.finish()
        return Ran(
            started_s=started_s,
            ended_s=time.monotonic(),
            peak_bytes=peak_resident_bytes() - self._images_bytes if can_peak else None,
            torch_peak_bytes=torch_peak_bytes,
        )

    def _starter(self, patches: Sequence[int]) -> Callable[[], Pending]:
        """Of the batch, together with the other ranks."""
        grids, pixels, outputs = self._batch(patches)
        return partial(self._runner.start, grids, pixels, outputs if self._group.rank == 0 else None)

    def _starter_alone(self, patches: Sequence[int]) -> Callable[[], Pending]:
        """Of this rank's images of the batch, as a serving rank would have them."""
        mine = assign_images([self._spec.cost(count) for count in patches], self._group.world_size)[self._group.rank]
        return partial(self._runner.start_alone, *self._batch([patches[index] for index in mine]))

    def _batch(self, patches: Sequence[int]) -> tuple[list[Grid], list[Bytes], list[Bytes]]:
        images = [self._image(count) for count in patches]
        return [grid for grid, _, _ in images], [pixels for _, pixels, _ in images], [out for _, _, out in images]

    def _image(self, num_patches: int) -> tuple[Grid, Bytes, Bytes]:
        """Grid, pixels and room for the tokens of a noisy image; a service has the last two in its slab."""
        if num_patches not in self._images:
            grid = Grid.squarest(num_patches)
            pixels = self._room(num_patches, self._spec.patch_bytes)
            pixels[:] = np.random.default_rng(0).integers(0, 256, pixels.shape, np.uint8)
            output = self._room(grid.num_tokens, self._spec.text_hidden_size * ITEMSIZE[self._dtype])
            self._images[num_patches] = grid, pixels, output
        return self._images[num_patches]

    def _room(self, *shape: int) -> Bytes:
        """Touched, and for a GPU pinned, like the slab."""
        return torch.full(shape, 255, dtype=torch.uint8, pin_memory=self._group.device.type == "cuda").numpy()

    def _describe_device(self) -> str:
        device = self._group.device
        return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"

    def _time_modes(self, command: TimeModes) -> Timings:
        times = self._runner.time_modes(command.sizes)
        return Timings(
            timings=tuple(
                Timing(mode=mode, num_images=self._group.world_size, num_patches=size, seconds=seconds)
                for mode, size, seconds in times
            )
        )

    @property
    def _images_bytes(self) -> int:
        return sum(pixels.nbytes + output.nbytes for _, pixels, output in self._images.values())

    def _multiply(self, command: Products) -> Rates:
        rates = product_rates(
            self._spec,
            num_patches=command.patches,
            dtype=TORCH_DTYPES[self._dtype],
            device=self._group.device,
            seconds=command.seconds,
        )
        return Rates(flops_per_s=rates)


def _forget_peak() -> bool:
    """Whether this process's peak can be measured from here on."""
    try:
        forget_peak()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
