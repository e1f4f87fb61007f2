"""One rank of a tensor-parallel group, from start to exit; settings come by environment, started by `tp.worker`.

    start -> hello -> load -> ready -> serve -> exit

Every rank owns a connection to the front-end and waits there for work; rank 0 writes results to the slab, or in
data-parallel mode each rank its own. A rank that fails says why, exits, and so takes its group down: the launcher
starts a new one. It exits 0 only when told to stop. It never imports `service`.
"""

import argparse
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from tp import wire
from tp.checkpoint import CheckpointError, fingerprint, read_vision_tensors
from tp.control import EXIT_FRONT_END_GONE, ControlClient, RefusedError
from tp.exchange import ExchangeError
from tp.memory import MemoryShortError, fit_memory, scratch_rows, total_bytes
from tp.modes import assign_images, timing_sizes
from tp.parallel import TPGroup
from tp.process import resident_bytes
from tp.runner import Pending, Runner
from tp.settings import Settings, load_settings
from tp.slab import Slab, SlabLayout
from tp.spec import ITEMSIZE, Dtype, EncoderSpec, SpecError, check_world_size, read_spec

log = logging.getLogger("tpvision.rank")

_CONNECT_TIMEOUT_S = 60.0
_POLL_S = 50e-6  # of the device, which nothing tells when it is done
_PROGRESS_EVERY_S = 0.1
_SMALLEST_PATCHES = 4  # of one token
_DEVICE_FILES = Path("/dev")


class FatalStartError(RuntimeError):
    """Starting again would end the same way; the launcher finds this name in the error file and gives up."""


@record
def main() -> None:
    """The rank's whole life."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the front-end, which drains
    arguments = _parse_arguments()
    settings = load_settings(environ=os.environ).settings
    logging.basicConfig(level=settings.server.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    control = ControlClient.connect(arguments.socket, timeout_s=_CONNECT_TIMEOUT_S)
    try:
        slab, runner, group, max_patches = _start(control, settings, arguments.group)
        (arguments.ready_folder / f"ready-{group.rank}").touch()
        code = serve(control, slab, runner, group, max_patches)
    except (SpecError, CheckpointError, ExchangeError, RefusedError, MemoryShortError, FatalStartError) as error:
        control.send_failure(str(error), is_fatal=True)
        raise FatalStartError(str(error)) from error
    except Exception as error:
        control.send_failure(f"{type(error).__name__}: {error}", is_fatal=False)
        raise
    sys.stdout.flush()
    os._exit(code)  # no interpreter shutdown: nothing of ours is left to clean, and torch's can hang


def serve(control: ControlClient, slab: Slab, runner: Runner, group: TPGroup, max_patches: int) -> int:
    """Encode batch after batch until told to stop; the exit status.

    Every rank checks a batch before the first collective, so that a batch that one refuses starts on none. One that
    comes while the device is at the batch before is started at once: its launch and its copies are hidden, and the
    answer to the one before is late by no more than the launch. Ranks need not be equally far ahead: all start the same
    batches in the same order, and so the same collectives and graphs, in one stream of their device, where who is ahead
    waits for the others; and no start waits for another rank's answer.
    """
    running: _Running | None = None
    while True:
        if running is not None and not _comes_early(control, running):
            running.answer(control)
            running = None
        message = control.receive()
        if message is None:
            return EXIT_FRONT_END_GONE
        started = None
        try:
            if not isinstance(message, wire.Stop):
                started = _start_batch(message, slab, runner, group, max_patches)
        finally:  # also where the next batch cannot be started
            if running is not None:
                running.answer(control)
        if started is None:
            return 0
        running = started


@dataclass(frozen=True, slots=True)
class _Running:
    """A batch that was started and is not answered."""

    batch_id: int
    indexes: Sequence[int]  # of the images that this rank encodes
    pending: Pending

    def answer(self, control: ControlClient) -> None:
        """Wait for it, and say that it is done."""
        report = self.pending.finish()
        control.send(
            wire.Done(
                batch_id=self.batch_id,
                non_finite=[self.indexes[index] for index in report.non_finite],
                forward_s=report.forward_s,
                all_gather_s=report.all_gather_s,
                is_graphed=report.is_graphed,
            )
        )


def _comes_early(control: ControlClient, running: _Running) -> bool:
    """Wait for the next message, or for the batch that runs: whether the message was first."""
    while not running.pending.is_done():
        if control.has_message(_POLL_S):
            return True
    return False


def _start_batch(message: wire.Message, slab: Slab, runner: Runner, group: TPGroup, max_patches: int) -> _Running:
    if not isinstance(message, wire.Batch):
        raise wire.WireError(f"expected a batch, not {type(message).__name__}")
    if message.num_patches > max_patches:
        raise wire.WireError(f"a batch of {message.num_patches} patches is over the top tier of {max_patches}")
    mine = list(range(len(message.images)))
    if message.mode == "dp":
        costs = [runner.spec.cost(image.grid.num_patches) for image in message.images]
        mine = assign_images(costs, group.world_size)[group.rank]
    images = [message.images[index] for index in mine]
    grids = [image.grid for image in images]
    pixels = [slab.pixels(image.run) for image in images]
    outputs = [slab.tokens(image.run, image.grid.num_tokens) for image in images]
    if message.mode == "dp":
        pending = runner.start_alone(grids, pixels, outputs)
    else:
        pending = runner.start(grids, pixels, outputs if group.rank == 0 else None)
    return _Running(message.batch_id, mine, pending)


def _start(control: ControlClient, settings: Settings, group_index: int) -> tuple[Slab, Runner, TPGroup, int]:
    assert settings.model.path is not None, "the front-end resolves the model path"
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    spec = read_spec(settings.model.path)
    check_world_size(spec, world_size)
    dtype = settings.compute_dtype(spec)
    hello = wire.Hello(
        group=group_index,
        incarnation=os.environ["TORCHELASTIC_RUN_ID"],
        rank=rank,
        pid=os.getpid(),
        contract=wire.contract_for(settings, spec, world_size),
        weights_fingerprint=fingerprint(read_vision_tensors(settings.model.path, spec)),
    )
    welcome, slab = _join(control, hello, spec, ITEMSIZE[dtype])
    tiers = welcome.patch_capacities
    _compare_tiers(settings, tiers)
    device = choose_device(settings)
    if device.type == "cpu" and settings.parallel.threads is not None:
        torch.set_num_threads(settings.parallel.threads)
    if device.type == "cuda":
        pin(slab, device)
    group = TPGroup.from_environment(
        device, timeout_s=settings.collective_timeout_s, exchange=settings.parallel.exchange
    )
    runner = Runner.load(
        settings.model.path,
        spec,
        dtype=dtype,
        rms_norm_eps=settings.model.rms_norm_eps,
        group=group,
        resident=settings.parallel.resident,
        on_progress=_report_progress(control),
    )
    runner.warm_up(_SMALLEST_PATCHES)  # libraries set themselves up in the first forward, so a later one is timed
    graph_tiers: tuple[int, ...] = ()
    if settings.parallel.cuda_graphs == "on":
        graph_tiers = runner.capture(tiers)
    if device.type == "cuda":
        share = (0, 1) if settings.parallel.resident == "full" else (rank, world_size)  # it may encode alone
        check_device_memory(spec, tiers[-1], free_bytes=_free_bytes(device), share=share, dtype=dtype)
    report = runner.warm_up(tiers[0])
    timings: list[wire.Timing] = []
    if settings.parallel.resident == "full" and world_size > 1:
        timings = [
            wire.Timing(mode=mode, num_images=world_size, num_patches=size, seconds=seconds)
            for mode, size, seconds in runner.time_modes(timing_sizes(tiers[0], world_size))
        ]
    control.send(
        wire.Ready(
            device=str(device),
            weights_bytes=runner.memory().weights_bytes,
            slab_bytes=slab.layout.total_bytes,
            resident_bytes=resident_bytes(),
            device_free_bytes=torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None,
            attention=runner.describe_attention(),
            graph_tiers=list(graph_tiers),
            timings=timings,
            warm_up_patches=tiers[0],
            warm_up_s=report.forward_s + report.all_gather_s,
        )
    )
    return slab, runner, group, tiers[-1]


def _join(control: ControlClient, hello: wire.Hello, spec: EncoderSpec, itemsize: int) -> tuple[wire.Welcome, Slab]:
    welcome, descriptor = control.greet(hello)
    layout = SlabLayout.of(spec, num_patches=welcome.slab_patches, itemsize=itemsize)
    if welcome.slab_bytes != layout.total_bytes:
        raise RefusedError(f"slab bytes: {layout.total_bytes} here, {welcome.slab_bytes} there")
    control.watch()
    return welcome, Slab.map(descriptor, layout)


def _compare_tiers(settings: Settings, tiers: Sequence[int]) -> None:
    """The front-end's tiers hold; where they were raised for it alone, nobody compared them with memory here."""
    own = settings.capacity.max_patches_per_image
    if tiers[-1] > own:
        log.warning("the front-end's top tier is %d patches; memory here was checked for %d", tiers[-1], own)


def check_device_memory(spec: EncoderSpec, top: int, *, free_bytes: int, share: tuple[int, int], dtype: Dtype) -> None:
    """Raise MemoryShortError unless a GPU that has the weights has room for the scratch of a batch of `top` patches.

    `share` is what this rank encodes of it: as which rank of how many.
    """
    rank, world_size = share

    def needed_bytes(num_patches: int) -> int:
        return total_bytes(
            scratch_rows(spec, num_patches=num_patches, world_size=world_size, dtype=dtype, rank=rank, device="cuda")
        )

    fit = fit_memory(needed_bytes, top=top, available_bytes=free_bytes)
    fit.check("memory of the GPU beside the weights", f"for the scratch of {top:,} patches")


def _free_bytes(device: torch.device) -> int:
    """Of the GPU's memory: what nobody has, when torch keeps nothing for reuse but what graphs run in."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def choose_device(settings: Settings) -> torch.device:
    """The device of this rank. Raises FatalStartError when CUDA is asked for and there are fewer GPUs than ranks."""
    wanted, local_rank = settings.parallel.device, int(os.environ["LOCAL_RANK"])
    if wanted == "cpu":
        return torch.device("cpu")
    if wanted == "auto" and not torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        if visible and (gpus := sorted(file.name for file in _DEVICE_FILES.glob("nvidia[0-9]*"))):
            log.warning(
                "rank %d computes on CPU: torch sees no GPU, but there are %s here (CUDA_VISIBLE_DEVICES=%s): are they "
                "fewer than parallel.tensor x parallel.groups, or torch a build for CPU?",
                *(local_rank, ", ".join(gpus), visible),
            )
        return torch.device("cpu")
    if torch.cuda.device_count() <= local_rank:
        raise FatalStartError(f"rank {local_rank} of this machine has no GPU: {torch.cuda.device_count()} visible")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def pin(slab: Slab, device: torch.device) -> None:
    """Lock the slab's pages for the GPU: copies then run by DMA, beside the host. Where that fails they are slower."""
    memory = torch.from_numpy(slab.buffer)
    try:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    except torch.cuda.CudaError as error:
        log.warning("the slab's pages cannot be locked for the GPU, copies will be slower: %s", error)
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=device).neg_()  # takes the error that CUDA would report to the next kernel


def _report_progress(control: ControlClient) -> Callable[[int, int], None]:
    last = 0.0

    def report(loaded_bytes: int, total_bytes: int) -> None:
        nonlocal last
        now = time.monotonic()
        if loaded_bytes == total_bytes or now - last > _PROGRESS_EVERY_S:
            last = now
            control.send(wire.Progress(loaded_bytes=loaded_bytes, total_bytes=total_bytes))

    return report


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One rank of a tpvision worker group; started by torchrun.")
    parser.add_argument("--socket", type=Path, required=True, help="the front-end's control socket")
    parser.add_argument("--group", type=int, required=True, help="which of the front-end's groups this is")
    parser.add_argument("--ready-folder", type=Path, required=True, help="gets a file ready-RANK, for the launcher")
    return parser.parse_args()
