"""CUDA graphs for small tiers: one launch in place of a thousand, where launching costs more than computing.

Shapes: P patches of the tier, D hidden size, d head size, W ranks, I images that a graph has room for. A graph replays
fixed shapes on fixed memory, so a batch is padded to its tier on the device: rows past the batch are zeros and lie past
the last offset of `cu_seqlens`, images that are not there have no rows, and tokens of padding are cut off. All ranks
take the same path, since they see the same batch. Called by tp/runner.py; CUDA only, and only where it is asked for.
"""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from tp.attention import Sequences, takes_packed_images
from tp.model import MoonViT, Packing
from tp.parallel import TokenShare, split_tokens
from tp.spec import Grid

log = logging.getLogger("tpvision.graphs")

LARGEST_TIER = 4096  # patches; above, launching is a small part of a forward
MAX_IMAGES = 64  # a batch of more runs eagerly
_WARM_UPS = 3  # forwards before capture, in which libraries allocate and choose


class GraphedTier:
    """The blocks, the projector and the all-gather of one tier, captured. Images only: video chunks run eagerly."""

    def __init__(self, model: MoonViT, num_patches: int, pool: "torch.cuda._POOL_HANDLE") -> None:
        spec, group = model.spec, model.group
        self.num_patches = num_patches
        self._model = model
        dtype, device = model.pos_emb.dtype, group.device
        self._x = torch.zeros(num_patches, spec.hidden_size, dtype=dtype, device=device)
        self._rotation = torch.ones(num_patches, spec.head_dim // 2, dtype=torch.complex64, device=device)
        self._offsets = torch.zeros(MAX_IMAGES + 1, dtype=torch.int32, device=device)
        lengths = (num_patches, *[0] * (MAX_IMAGES - 1))
        self._packing = Packing(
            Sequences(lengths, self._offsets), self._rotation, _shares(num_patches, group.world_size)
        )
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                self._forward()
        torch.cuda.current_stream(device).wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):  # NCCL's watchdog looks on
            self._tokens = self._forward()

    def takes(self, packing: Packing) -> bool:
        """Whether the graph has room for this batch, and knows its kind."""
        lengths = packing.sequences.lengths
        return sum(lengths) <= self.num_patches and len(lengths) <= MAX_IMAGES and packing.is_of_images

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


def capture(model: MoonViT, tiers: Sequence[int]) -> list[GraphedTier]:
    """A graph for each small one of these tiers whose result agrees with the eager forward.

    The others stay eager, those whose graph failed with a line in the log. Every rank must call it alike: collectives
    are captured too. None where attention takes one image at a time, as its images would be captured with it.
    """
    if not takes_packed_images(model.group.device, model.pos_emb.dtype, model.spec.head_dim):
        return []
    pool = torch.cuda.graph_pool_handle()
    graphed = []
    for tier in sorted(tier for tier in tiers if tier <= LARGEST_TIER):
        graph = _captured(model, tier, pool)
        if graph is None:
            break  # whatever went wrong would again
        fault = _fault_of(graph, model)
        if fault is None:
            graphed.append(graph)
        else:
            log.warning("the CUDA graph of tier %d is not used: %s", tier, fault)
    return graphed


def _captured(model: MoonViT, tier: int, pool: "torch.cuda._POOL_HANDLE") -> GraphedTier | None:
    """None, on every rank, where any rank fails: nothing that is captured runs, so none waits for it."""
    graph = None
    try:
        graph = GraphedTier(model, tier, pool)
    except RuntimeError as error:
        log.warning("the CUDA graph of tier %d cannot be captured: %s", tier, error)
    num_graphs = model.group.all_reduce_(torch.full((1,), float(graph is not None), device=model.group.device))
    return graph if num_graphs.item() == model.group.world_size else None


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
    sequences = Sequences.of([rows], model.group.device)
    packing = Packing(sequences, rotation, _shares(rows, model.group.world_size))
    expected = model.group.all_gather(model.encode_rows(x.clone(), packing))[: rows // 4].float()
    found = graph.replay(x, packing).float()
    if not bool(torch.isfinite(found).all()):
        return "its output holds NaN or infinity"
    distance = float((found - expected).norm() / expected.norm().clamp(min=1e-12))
    return None if distance < 1e-2 else f"its output is {distance:.3g} from the eager one"
