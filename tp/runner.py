"""One rank's encoder: loads it, runs a batch through it, writes each image's tokens where the caller wants them.

Knows arrays and grids, not sockets or slabs; every rank of the group must start the same batches in the same order.
Called by tp/rank.py. CPU threads are the caller's business.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tp.checkpoint import check_tensors, fingerprint, read_vision_tensors
from tp.graphs import GraphedTier, capture
from tp.kernels import Kernels, choose_kernels
from tp.model import RMS_NORM_EPS, MoonViT
from tp.modes import Mode
from tp.parallel import TPGroup
from tp.spec import ITEMSIZE, Dtype, EncoderSpec, Grid
from tp.streams import Moment, streams_of
from tp.weights import TORCH_DTYPES, Progress, load_weights, share_weights

Bytes = npt.NDArray[np.uint8]


class BatchError(ValueError):
    """A batch's grids, pixels and outputs do not fit each other or the encoder. Raised before any collective."""


@dataclass(frozen=True, slots=True)
class EncodeReport:
    """What one batch took on this rank. `non_finite` holds indexes of images with a NaN or infinity, where scanned.

    On CUDA by the device's clock, from when it is done with the batch before.
    """

    forward_s: float  # to device, forward, up to this rank's share of the tokens
    all_gather_s: float  # waits for slower ranks included
    non_finite: tuple[int, ...]
    is_graphed: bool = False  # it replayed a CUDA graph


@dataclass(frozen=True, slots=True)
class Pending:
    """A batch that was started. Its pixels are read, and its outputs written, until it is done."""

    began: Moment
    encoded: Moment  # this rank's share
    gathered: Moment
    done: Moment
    finite: Tensor | None = None  # [images] bool, where scanned
    is_graphed: bool = False

    def is_done(self) -> bool:
        """Whether `finish` returns at once. Raises what went wrong on the device."""
        return self.done.is_past()

    def finish(self) -> EncodeReport:
        """Wait for it. Raises what went wrong on the device."""
        self.done.wait()
        finite = [] if self.finite is None else self.finite.tolist()
        return EncodeReport(
            self.encoded.seconds_since(self.began),
            self.gathered.seconds_since(self.encoded),
            tuple(index for index, is_finite in enumerate(finite) if not is_finite),
            self.is_graphed,
        )


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes that this rank holds."""

    weights_bytes: int
    peak_allocated_bytes: int | None  # on the device since the start, weights included; None on CPU


class Runner:
    """A loaded encoder shard. `fingerprint` identifies the checkpoint's weights and is the same on every rank."""

    def __init__(
        self, model: MoonViT, whole: MoonViT | None, kernels: Kernels, *, dtype: Dtype, fingerprint: str
    ) -> None:
        self.spec = model.spec
        self.dtype = dtype
        self.fingerprint = fingerprint
        self._model = model
        self._whole = whole  # unsharded, where this rank holds all weights
        self._graphs: list[GraphedTier] = []
        self._kernels = kernels
        self._group = model.group
        self._streams = streams_of(model.group.device)

    @classmethod
    def load(
        cls,
        model_dir: Path,
        spec: EncoderSpec,
        *,
        dtype: Dtype,
        group: TPGroup,
        rms_norm_eps: float = RMS_NORM_EPS,
        kernels: Kernels | None = None,
        resident: Literal["shard", "full"] = "shard",
        on_progress: Progress | None = None,
    ) -> "Runner":
        """Load this rank's shard, computing in `dtype` with `kernels`, by default the fastest that work here.

        `resident` "full" loads all weights, for `encode_alone` too. Raises CheckpointError naming the tensor or file at
        fault.
        """
        table = read_vision_tensors(model_dir, spec)
        check_tensors(spec, table)
        kernels = kernels or choose_kernels(group.device, TORCH_DTYPES[dtype])
        model = MoonViT(spec, group, rms_norm_eps=rms_norm_eps, kernels=kernels)
        whole = model
        if resident == "full" and group.world_size > 1:
            whole = MoonViT(spec, TPGroup.single(group.device), rms_norm_eps=rms_norm_eps, kernels=kernels)
        load_weights(whole, table, dtype=TORCH_DTYPES[dtype], on_progress=on_progress)
        if whole is not model:
            share_weights(whole, model)
        return cls(model, whole if resident == "full" else None, kernels, dtype=dtype, fingerprint=fingerprint(table))

    def encode(
        self, grids: Sequence[Grid], pixels: Sequence[Bytes], outputs: Sequence[Bytes] | None = None
    ) -> EncodeReport:
        """Encode a batch: grids[i] with its pixel rows uint8 [n, 588] in packed row order.

        With `outputs` (rank 0), image i's tokens are written to outputs[i], uint8 [num_tokens, text hidden * itemsize]
        holding the compute dtype's bytes, and scanned for non-finite values. Raises BatchError on a misfit.
        """
        return self.start(grids, pixels, outputs).finish()

    def encode_alone(
        self, grids: Sequence[Grid], pixels: Sequence[Bytes], outputs: Sequence[Bytes] | None = None
    ) -> EncodeReport:
        """The same on this rank alone, whatever the others do; needs all weights here. Nothing to encode is fine."""
        return self.start_alone(grids, pixels, outputs).finish()

    def start(self, grids: Sequence[Grid], pixels: Sequence[Bytes], outputs: Sequence[Bytes] | None = None) -> Pending:
        """Begin to encode a batch: the same as `encode`, which on CUDA goes on after this returns.

        Another batch may be started meanwhile: its pixels are copied to the device while this one is computed, and this
        one's tokens are copied back while that one is. Results are the same bits.
        """
        self._check(grids, pixels, outputs)
        return self._start(self._model, grids, pixels, outputs)

    def start_alone(
        self, grids: Sequence[Grid], pixels: Sequence[Bytes], outputs: Sequence[Bytes] | None = None
    ) -> Pending:
        """Begin to `encode_alone`."""
        if self._whole is None:
            raise BatchError("this rank holds a shard of the weights: it cannot encode alone")
        if not grids:
            now = self._streams.mark()
            return Pending(now, now, now, now)
        self._check(grids, pixels, outputs)
        return self._start(self._whole, grids, pixels, outputs)

    @torch.inference_mode()
    def _start(
        self, model: MoonViT, grids: Sequence[Grid], pixels: Sequence[Bytes], outputs: Sequence[Bytes] | None
    ) -> Pending:
        began = self._streams.mark()
        packing = model.pack(grids)
        x = model.embed(self._streams.copy_in(lambda: self._pack(pixels)), grids)
        graph = next((graph for graph in self._graphs if model is self._model and graph.takes(packing)), None)
        if graph is not None:
            tokens = graph.replay(x, packing)
            encoded = gathered = self._streams.mark()
        else:
            share = model.encode_rows(x, packing)
            encoded = self._streams.mark()
            tokens = model.gather(share, grids)
            gathered = self._streams.mark()
        finite: Tensor | None = None
        done = gathered
        if outputs is not None:
            finite, done = self._streams.copy_out(tokens, partial(_write, grids=grids, outputs=outputs))
        return Pending(began, encoded, gathered, done, finite, is_graphed=graph is not None)

    def warm_up(self, num_patches: int) -> EncodeReport:
        """Encode one black image of `num_patches` (a multiple of 4), as near to a square as they allow."""
        return self.encode(*self._black_images(num_patches, 1))

    @torch.inference_mode()
    def capture(self, tiers: Sequence[int]) -> tuple[int, ...]:
        """Capture CUDA graphs for the small ones of these tiers; which came out right, and are used from now on."""
        if self._group.device.type == "cuda":
            self._graphs = capture(self._model, tiers)
        return tuple(sorted({graph.num_patches for graph in self._graphs}))

    def time_modes(self, sizes: Sequence[int]) -> list[tuple[Mode, int, float]]:
        """What one image a rank, of each of these patch counts, takes in each mode: (mode, patches, seconds).

        The better of two, in turns, so that a machine that slows down slows both modes. In data-parallel mode all ranks
        encode at once, as they do in a batch.
        """
        times: list[tuple[Mode, int, float]] = []
        for size in sizes:
            one, batch = self._black_images(size, 1), self._black_images(size, self._group.world_size)
            runs = [(_total_s(self.encode(*batch)), _total_s(self.encode_alone(*one))) for _ in range(2)]
            together, alone = zip(*runs, strict=True)
            times += [("tp", size, min(together)), ("dp", size, min(alone))]
        return times

    def _black_images(self, num_patches: int, num_images: int) -> tuple[list[Grid], list[Bytes]]:
        grid = Grid.squarest(num_patches)
        pixels = np.zeros((grid.num_patches, self.spec.patch_bytes), np.uint8)
        return [grid] * num_images, [pixels] * num_images

    def memory(self) -> RankMemory:
        """What the rank holds now, and on CUDA has held at most."""
        models = (self._model, *((self._whole,) if self._whole else ()))
        storages = [parameter.untyped_storage() for model in models for parameter in model.parameters()]
        weights = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
        device = self._group.device
        return RankMemory(weights, torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None)

    def describe_attention(self) -> str:
        """Which attention kernel the rank uses, in words for a person."""
        return self._kernels.describe(self._group.device, TORCH_DTYPES[self.dtype], self.spec.head_dim)

    def _check(self, grids: Sequence[Grid], pixels: Sequence[Bytes], outputs: Sequence[Bytes] | None) -> None:
        if not grids or len(pixels) != len(grids) or (outputs is not None and len(outputs) != len(grids)):
            raise BatchError(
                f"{len(grids)} grids need as many pixel arrays ({len(pixels)}) and outputs "
                f"({'none' if outputs is None else len(outputs)}), and at least one"
            )
        token_bytes = self.spec.text_hidden_size * ITEMSIZE[self.dtype]
        for index, grid in enumerate(grids):
            if (
                grid.t not in range(1, self.spec.pos_emb_time + 1)
                or grid.h < 2
                or grid.w < 2
                or grid.h % 2
                or grid.w % 2
            ):
                raise BatchError(f"image {index}: {grid} needs 1 to {self.spec.pos_emb_time} frames and even sides")
            _check_array(f"pixels of image {index}", pixels[index], (grid.num_patches, self.spec.patch_bytes))
            if outputs is not None:
                _check_array(f"output of image {index}", outputs[index], (grid.num_tokens, token_bytes))

    def _pack(self, pixels: Sequence[Bytes]) -> Tensor:
        """All rows in one uint8 [N, 588] on the device."""
        device, sizes = self._group.device, [len(part) for part in pixels]
        packed = torch.empty(sum(sizes), self.spec.patch_bytes, dtype=torch.uint8, device=device)
        for rows, part in zip(torch.split(packed, sizes), pixels, strict=True):
            rows.copy_(torch.from_numpy(np.require(part, requirements="W")), non_blocking=True)
        return packed


def _total_s(report: EncodeReport) -> float:
    return report.forward_s + report.all_gather_s


def _write(tokens: Tensor, grids: Sequence[Grid], outputs: Sequence[Bytes]) -> Tensor:
    """Which images are finite: [images] bool, on the host once the tokens are in `outputs`."""
    parts = torch.split(tokens, [grid.num_tokens for grid in grids])
    for part, output in zip(parts, outputs, strict=True):
        torch.from_numpy(output).view(part.dtype).copy_(part, non_blocking=True)
    return torch.stack([_is_finite(part) for part in parts]).to("cpu", non_blocking=True)


def _check_array(what: str, array: Bytes, shape: tuple[int, int]) -> None:
    if array.dtype != np.uint8 or array.shape != shape or not array.flags.c_contiguous:
        raise BatchError(f"{what} must be contiguous uint8 {shape}, not {array.dtype} {array.shape}")


def _is_finite(x: Tensor) -> Tensor:
    """Without a mask as large as x: a NaN or an infinity shows in the least or the largest value."""
    return torch.isfinite(torch.stack(torch.aminmax(x))).all()
