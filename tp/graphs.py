"""CUDA graphs for small tiers: one launch in place of a thousand, where launching costs more than computing.

Shapes: P patches of the tier, D hidden size, d head size, W ranks, I images that a graph has room for. A graph replays
fixed shapes on fixed memory, so a batch is padded to its tier on the device: rows past the batch are zeros and lie past
the last offset of `cu_seqlens`, images that are not there have no rows, and tokens of padding are cut off. Padding is
computed like anything else, so a batch that leaves much of a large tier empty runs eagerly. Attention starts thread
blocks for every image that there is room for, as many as the tier's largest needs, so a tier has graphs for a lone
image, for a few and for many. All ranks take the same path, since they see the same batch. Called by tp/runner.py; CUDA
only, and only where it is asked for.
"""

import contextlib
import logging
from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from tp.attention import Sequences, takes_packed_images
from tp.model import MoonViT, Packing
from tp.parallel import TokenShare, split_tokens
from tp.spec import Grid

log = logging.getLogger("tpvision.graphs")

LARGEST_TIER = 4096  # patches; above, launching is a small part of a forward
LAUNCH_BOUND = 1024  # patches a rank, up to which launching takes longer than computing, and padding so costs nothing
MAX_IMAGES = 64  # a batch of more runs eagerly
_ROOMS = (1, 8, MAX_IMAGES)  # images that the graphs of a tier have room for
_TOLERANCE = 3e-2  # of the eager output: two that are right, from products that round in another order, are 1e-2 apart
_WARM_UPS = 3  # forwards before capture, in which libraries allocate and choose


class GraphedTier:
    """The blocks, the projector and the all-gather of one tier, captured. Images only: video chunks run eagerly."""

    def __init__(
        self,
        model: MoonViT,
        num_patches: int,
        num_images: int,
        *,
        pool: "torch.cuda._POOL_HANDLE",
        stream: torch.cuda.Stream,
    ) -> None:
        """Graphs that share a `pool` of memory are captured in one `stream`, which is not the current one."""
        spec, group = model.spec, model.group
        self.num_patches = num_patches
        self.num_images = num_images
        self._model = model
        dtype, device = model.pos_emb.dtype, group.device
        self._x = torch.zeros(num_patches, spec.hidden_size, dtype=dtype, device=device)
        self._rotation = torch.ones(num_patches, spec.head_dim // 2, dtype=torch.complex64, device=device)
        self._offsets = torch.zeros(num_images + 1, dtype=torch.int32, device=device)
        lengths = (num_patches, *[0] * (num_images - 1))
        self._packing = Packing(
            Sequences(lengths, self._offsets), self._rotation, _shares(num_patches, group.world_size)
        )
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                self._forward()
        torch.cuda.current_stream(device).wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        capturing = torch.cuda.graph(  # NCCL's watchdog looks on, in a thread of its own
            self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"
        )
        with capturing:
            self._tokens = self._forward()

    def takes(self, packing: Packing) -> bool:
        """Whether the graph has room for this batch, little of it is left empty, and it knows the batch's kind."""
        lengths = packing.sequences.lengths
        return (
            len(lengths) <= self.num_images
            and fills(sum(lengths), self.num_patches, self._model.group.world_size)
            and packing.is_of_images
        )

    def replay(self, x: Tensor, packing: Packing) -> Tensor:
        """Embedded patches [N, D] -> merged tokens [N / 4, text hidden].

        A copy: the graph's own are overwritten by the next replay, of any tier, as all share one pool of memory.
        """
        rows, images = x.shape[0], len(packing.sequences.lengths)
        self._x[:rows].copy_(x)
        self._x[rows:].zero_()
        self._rotation[:rows].copy_(packing.rotation)
        self._offsets[: images + 1].copy_(packing.sequences.cu_seqlens)
        self._offsets[images + 1 :].fill_(rows)
        self._graph.replay()
        return self._tokens[: rows // 4].clone()

    def _forward(self) -> Tensor:
        return self._model.group.all_gather(self._model.encode_rows(self._x, self._packing))


def fills(num_patches: int, tier: int, world_size: int) -> bool:
    """Whether so many patches fit a tier and fill three quarters of it, or as much as is computed for nothing."""
    return num_patches <= tier and (tier <= LAUNCH_BOUND * world_size or 4 * num_patches >= 3 * tier)


def capture(model: MoonViT, tiers: Sequence[int]) -> list[GraphedTier]:
    """Graphs for each small one of these tiers whose result agrees with the eager forward, the smallest first.

    The others stay eager, those whose graph failed with a line in the log. Every rank must call it alike: collectives
    are captured too. None where attention takes one image at a time, as its images would be captured with it.
    """
    if not takes_packed_images(model.group.device, model.pos_emb.dtype, model.spec.head_dim):
        return []
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(model.group.device)  # type: ignore[no-untyped-call]
    graphed = []
    for tier, num_images in product(sorted(tier for tier in tiers if tier <= LARGEST_TIER), _ROOMS):
        graph = _captured(model, tier, num_images, pool, stream)
        if graph is None:
            break  # whatever went wrong would again
        fault = _fault_of(graph, model)
        if fault is None:
            graphed.append(graph)
        else:
            log.warning("the CUDA graph of tier %d for %d images is not used: %s", tier, num_images, fault)
    return graphed


def _captured(
    model: MoonViT, tier: int, num_images: int, pool: "torch.cuda._POOL_HANDLE", stream: torch.cuda.Stream
) -> GraphedTier | None:
    """None, on every rank, where any rank fails: nothing that is captured runs, so none waits for it."""
    graph, before = None, torch.cuda.current_stream(model.group.device)
    try:
        graph = GraphedTier(model, tier, num_images, pool=pool, stream=stream)
    except RuntimeError as error:
        log.warning("the CUDA graph of tier %d for %d images cannot be captured: %s", tier, num_images, error)
        _leave_capture(before, pool)
    num_graphs = model.group.all_reduce_(torch.full((1,), float(graph is not None), device=model.group.device))
    return graph if num_graphs.item() == model.group.world_size else None


def _leave_capture(before: torch.cuda.Stream, pool: "torch.cuda._POOL_HANDLE") -> None:
    """After a capture that failed: torch leaves its stream current, and its allocator as if it went on.

    `torch.cuda.empty_cache` would fail then, and memory that several streams used would never be free again.
    """
    torch.cuda.set_stream(before)
    device = torch.cuda.current_device()
    with contextlib.suppress(RuntimeError):  # it failed before the capture began, or after it ended
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)


def _shares(num_patches: int, world_size: int) -> tuple[TokenShare, ...]:
    """Of one image with so many patches; where its rows and columns lie does not matter."""
    return split_tokens([Grid(1, 2, num_patches // 2)], world_size)


def _fault_of(graph: GraphedTier, model: MoonViT) -> str | None:
    """What is wrong with a captured graph, by a batch that does not fill it; the same answer on every rank."""
    rows = max(4, graph.num_patches // 8 * 4)
    generator = torch.Generator(device=model.group.device).manual_seed(0)
    x = torch.randn(rows, model.spec.hidden_size, device=model.group.device, generator=generator).to(
        model.pos_emb.dtype
    )
    rotation = torch.ones(rows, model.spec.head_dim // 2, dtype=torch.complex64, device=model.group.device)
    lengths = [rows] if graph.num_images == 1 or rows == 4 else [4, rows - 4]
    sequences = Sequences.of(lengths, model.group.device)
    packing = Packing(sequences, rotation, _shares(rows, model.group.world_size))
    expected = model.group.all_gather(model.encode_rows(x.clone(), packing))[: rows // 4].float()
    found = graph.replay(x, packing).float()
    if not bool(torch.isfinite(found).all()):
        return "its output holds NaN or infinity"
    distance = float((found - expected).norm() / expected.norm().clamp(min=1e-12))
    return None if distance < _TOLERANCE else f"its output is {distance:.3g} from the eager one"
