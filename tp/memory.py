"""What a rank holds in memory, by name, formula and bytes: weights, arenas, and the scratch of one forward.

Pure arithmetic, no torch: `tpvision plan` prints it before anything is started. It follows tp/model.py: whoever adds a
tensor there adds a row here; tests/tp/test_memory.py measures a forward and holds its peak against `scratch_rows`.
Counted is what torch allocates on a CPU rank. Beside it lie the interpreter and torch's libraries, gloo's staging
buffers, and oneDNN's weight reorders in half types. On CUDA the attention kernel keeps no thread buffers or packed
keys and RMSNorm is one kernel without float32 rows, so those are left out, and what the copies of the batch before may
still hold is added; beside the rows lie NCCL's and cuBLAS' workspaces and the allocator's rounding.
"""

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tp.checkpoint import MLP_UNIT, shard_range
from tp.spec import ITEMSIZE, Dtype, EncoderSpec

ROW_CHUNK = 2048  # patches that a layer's scratch is sized for, as large matrix products want no more
NARROW_RUN = 128  # patches that an elementwise step on a CPU takes at a time: its float32 copies stay in a core's cache
FEWEST_QUERIES, MOST_QUERIES = 128, 512  # whose scores attention on a CPU holds at a time
_SCORES_OF_ONE = 2**19  # so many stay near a core's second-level cache
_SCORES_OF_SEVERAL = 2**23  # threads: each product starts and joins them; more, and malloc maps the scores each time

Factor = tuple[int, str]  # a count and what it counts
Rows = tuple["MemoryRow", ...]
Device = Literal["cpu", "cuda"]


class MemoryShortError(RuntimeError):
    """A top tier needs more memory than there is."""


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """One tensor, or one kind of tensor. `formula` is the product that `num_bytes` came from."""

    name: str
    formula: str
    num_bytes: int


def total_bytes(rows: Rows) -> int:
    """Their sum."""
    return sum(row.num_bytes for row in rows)


@dataclass(frozen=True, slots=True)
class MemoryFit:
    """What the top tier needs, what there is, and the largest tier that would fit; None where not even one token's."""

    needed_bytes: int
    available_bytes: int
    largest_tier: int | None

    @property
    def missing_bytes(self) -> int:
        """0 where it fits."""
        return max(0, self.needed_bytes - self.available_bytes)

    def check(self, memory: str, purpose: str) -> None:
        """Raise MemoryShortError, saying which `memory` is too small and what for, unless it fits."""
        if self.missing_bytes:
            fitting = "none" if self.largest_tier is None else f"{self.largest_tier:,} patches"
            raise MemoryShortError(
                f"the tiers do not fit the {memory}: {self.needed_bytes:,} bytes are needed {purpose}, "
                f"{self.available_bytes:,} are there, {self.missing_bytes:,} are missing; "
                f"the largest tier that would fit: {fitting}"
            )


def fit_memory(needed_bytes: Callable[[int], int], *, top: int, available_bytes: int) -> MemoryFit:
    """Compare. `needed_bytes(tier)` is what that top tier needs, and grows with it."""
    tiers = range(4, top + 1, 4)
    num_fitting = bisect_right(tiers, available_bytes, key=needed_bytes)
    return MemoryFit(needed_bytes(top), available_bytes, tiers[num_fitting - 1] if num_fitting else None)


def weight_rows(
    spec: EncoderSpec, *, world_size: int, dtype: Dtype, rank: int = 0, resident: Literal["shard", "full"] = "shard"
) -> Rows:
    """The weights that `rank` of `world_size` holds. Ranks differ where MLP columns do not divide evenly.

    A rank that holds them in full also has copies of what tensor-parallel mode does not find in one run.
    """
    size: Factor = (ITEMSIZE[dtype], "B")
    layers: Factor = (spec.num_layers, "layers")
    bias = int(spec.has_bias)
    norm: Factor = (2 if spec.norm == "layernorm" else 1, "vectors")
    hidden, width, merged = spec.hidden_size, spec.qkv_size // world_size, 4 * spec.hidden_size
    mlp = _mlp_columns(spec, rank, world_size)
    projector_norm = hidden if spec.projector == "pre_norm" else spec.text_hidden_size
    if resident == "full" and world_size > 1:
        return (
            *weight_rows(spec, world_size=1, dtype=dtype),
            _row("copied wqkv shard", layers, (3 * width, "rows"), (hidden + bias, "columns"), size),
            _row("copied wo shard", layers, (hidden, "rows"), (width, "columns"), size),
            _row("copied fc1 shard", layers, (hidden, "rows"), (mlp, "columns"), size),
        )
    return (
        _row("patch embedding", (hidden, "rows"), (spec.patch_bytes + bias, "columns"), size),
        _row("position table", (spec.pos_emb_height, "rows"), (spec.pos_emb_width, "columns"), (hidden, "wide"), size),
        _row("tower norms", (2 * spec.num_layers + 1, "norms"), norm, (hidden, "wide"), size),
        _row("wqkv shard", layers, (3 * width, "rows"), (hidden + bias, "columns"), size),
        _row("wo shard", layers, (hidden, "rows"), (width + bias, "columns"), size),
        _row("fc0 shard", layers, (mlp, "rows"), (hidden + bias, "columns"), size),
        _row("fc1 shard", layers, (hidden, "rows"), (mlp + bias, "columns"), size),
        _row("projector norm", norm, (projector_norm, "wide"), size),
        _row("projector linear 1", (merged, "rows"), (merged + bias, "columns"), size),
        _row("projector linear 2", (spec.text_hidden_size, "rows"), (merged + bias, "columns"), size),
    )


def arena_rows(spec: EncoderSpec, *, num_patches: int, dtype: Dtype) -> Rows:
    """The slab's two arenas for `num_patches` patches of images in flight."""
    token_bytes = spec.text_hidden_size * ITEMSIZE[dtype]
    return (
        _row("pixel arena", (num_patches, "patches"), (spec.patch_bytes, "B")),
        _row("token arena", (num_patches // 4, "tokens"), (token_bytes, "B")),
    )


def query_run(num_patches: int, threads: int) -> int:
    """Queries of an image of that size whose scores attention on a CPU holds at a time: the more keys, the fewer."""
    return max(FEWEST_QUERIES, min(MOST_QUERIES, _scores(threads) // num_patches // 32 * 32))


def most_scores(num_patches: int, threads: int) -> int:
    """Scores that attention on a CPU holds at a time at most, of images of up to so many patches."""
    of_shorter = min(num_patches, MOST_QUERIES) * min(num_patches, _scores(threads) // MOST_QUERIES)
    return max(of_shorter, min(num_patches, FEWEST_QUERIES) * num_patches)


def _scores(threads: int) -> int:
    return _SCORES_OF_ONE if threads == 1 else _SCORES_OF_SEVERAL


def scratch_rows(
    spec: EncoderSpec,
    *,
    num_patches: int,
    world_size: int,
    dtype: Dtype,
    threads: int = 1,
    rank: int = 0,
    device: Device = "cpu",
) -> Rows:
    """What a forward over `num_patches` patches holds when it holds most, the batch's pixels included.

    Of images; video chunks make fewer tokens of as many patches, and their means fit where those tokens would be.

    The sum is an upper bound: of every step, the one with the largest sum. `threads` are the CPU threads of the rank.
    """
    sizes = _Sizes(
        spec,
        num_patches=num_patches,
        world_size=world_size,
        dtype=dtype,
        threads=threads,
        rank=rank,
        on_cpu=device == "cpu",
    )
    return max(sizes.steps(), key=total_bytes)


def _mlp_columns(spec: EncoderSpec, rank: int, world_size: int) -> int:
    start, stop = shard_range(spec.mlp_size, unit=MLP_UNIT, rank=rank, world_size=world_size)
    return stop - start


def _row(name: str, *factors: Factor) -> MemoryRow:
    formula = " × ".join(f"{count:,} {what}" for count, what in factors)
    return MemoryRow(name, formula, math.prod(count for count, _ in factors))


class _Sizes:
    """The steps of tp/model.py's forward, each as the rows that are alive in it."""

    def __init__(
        self,
        spec: EncoderSpec,
        *,
        num_patches: int,
        world_size: int,
        dtype: Dtype,
        threads: int,
        rank: int,
        on_cpu: bool,
    ) -> None:
        self.spec = spec
        self.world_size = world_size
        self.threads = threads
        self.on_cpu = on_cpu
        self.size: Factor = (ITEMSIZE[dtype], "B")
        self.is_half = ITEMSIZE[dtype] < 4
        self.patches: Factor = (num_patches, "patches")
        self.chunk: Factor = (min(num_patches, ROW_CHUNK), "patches at a time")
        self.hidden: Factor = (spec.hidden_size, "hidden")
        self.width = spec.qkv_size // world_size
        self.mlp_columns: Factor = (_mlp_columns(spec, rank, world_size), "MLP columns")
        self.share_tokens = -(-num_patches // 4 // world_size)

        self.pixels = _row("pixels of the batch", self.patches, (spec.patch_bytes, "B"))
        self.residual = _row("residual stream", self.patches, self.hidden, self.size)
        rotation = _row("rotations", self.patches, (spec.head_dim // 2, "pairs"), (8, "B"))
        statistics = _row("norm statistics and offsets", self.patches, (16, "B"))
        self.held = (self.pixels, self.residual, rotation, statistics)
        self.attended = _row("attention output", self.patches, (self.width, "channels"), self.size)
        self.all_qkv = _row("q, k and v", self.patches, (3 * self.width, "channels"), self.size)
        rows = (4 * self.share_tokens, "patches of a share")
        self.partial = _row("partial sums", (world_size, "shares"), rows, self.hidden, self.size)
        self.share = _row("residual stream of the share", rows, self.hidden, self.size)
        self.all_tokens: Factor = (world_size * self.share_tokens, "tokens")
        self.text: Factor = (spec.text_hidden_size, "wide")
        self.before = (
            _row("pixels of the batch before", self.patches, (spec.patch_bytes, "B")),
            _row("tokens of the batch before", self.all_tokens, self.text, self.size),
        )

    def steps(self) -> tuple[Rows, ...]:
        attention = (self.attention(), self.fused_attention()) if self.on_cpu else (self.fused_attention(),)
        block = (self.qkv(), self.rotate(), *attention, self.wo(), self.mlp())
        scatter = (self.scatter(),) if self.world_size > 1 else ()
        steps = (self.embed(), *block, *scatter, self.project(), self.gather())
        return steps if self.on_cpu else tuple((*step, *self.before) for step in steps)

    def embed(self) -> Rows:
        spec, chunk = self.spec, self.chunk
        first_rows = min(ROW_CHUNK, self.patches[0] * spec.pos_emb_width // 2)
        values = (spec.patch_bytes, "values")
        return (
            self.pixels,
            self.residual,
            _row("pixel table indices", chunk, values, (4, "B")),
            _row("normalised pixels", chunk, values, self.size),
            _row("embedded patches", chunk, self.hidden, self.size),
            _row(
                "position table in float32",
                (spec.pos_emb_height * spec.pos_emb_width if self.is_half else 0, "entries"),
                self.hidden,
                (4, "B"),
            ),
            _row("resampled rows", (first_rows, "entries"), self.hidden, (4, "B")),
            _row("column weights", chunk, (spec.pos_emb_width, "entries"), (4, "B")),
            _row("resampled entries", chunk, self.hidden, (4 + self.size[0], "B")),
        )

    def qkv(self) -> Rows:
        return (*self.held, *self._normed(self.patches, self.hidden, self.all_qkv))

    def rotate(self) -> Rows:
        run = (min(self.patches[0], NARROW_RUN), "patches at a time") if self.on_cpu else self.patches
        turns = _row("turns of a run, scaled", run, (self.spec.head_dim // 2, "pairs"), (8, "B"))
        turned = _row("q or k of a run in float32", run, (self.width, "channels"), (4, "B"))  # or both, in a half type
        return (*self.held, self.all_qkv, turns, *((turned,) if self.is_half else ()))

    def attention(self) -> Rows:
        head = (self.spec.head_dim, "of a head")
        run = (min(self.patches[0], MOST_QUERIES), "queries at a time")
        return (
            *self.held,
            self.all_qkv,
            self.attended,
            _row("keys and values of a head, one as it was", (3, "times"), self.patches, head, self.size),
            _row("scores", (most_scores(self.patches[0], self.threads), "at a time"), self.size),
            _row("attention output of a run", run, head, self.size),
        )

    def fused_attention(self) -> Rows:
        spec = self.spec
        heads = spec.num_heads // self.world_size
        # Tiles of 256 queries by 512 keys, a run of output and the sums, in float32; probabilities again in half types.
        tile = 256 * (512 + spec.head_dim + 2) * 4 + (256 * 512 * 2 if self.is_half else 0)
        packed = _row("keys and values packed for AMX", self.patches, (2 * self.width, "channels"), self.size)
        of_cpu = (_row("attention tiles", (self.threads, "threads"), (tile, "B")), *((packed,) if self.is_half else ()))
        of_cuda = (_row("rotated q and k", self.patches, (2 * self.width, "channels"), self.size),)
        return (
            *self.held,
            self.all_qkv,
            self.attended,
            _row("log-sum-exps", self.patches, (heads, "heads"), (4, "B")),
            *(of_cpu if self.on_cpu else of_cuda),
        )

    def wo(self) -> Rows:
        product = (self.partial,) if self.on_cpu or self.world_size > 1 else ()  # a lone GPU adds it as it makes it
        return (*self.held, self.all_qkv, *product)

    def mlp(self) -> Rows:
        columns = _row("MLP columns before and after GELU", (2, "times"), self.chunk, self.mlp_columns, self.size)
        product = _row("product of a run", self.chunk, self.hidden, self.size)
        partial = (self.partial,) if self.world_size > 1 else ()
        return (*self.held, *partial, *self._normed(self.chunk, self.hidden, columns, product))

    def scatter(self) -> Rows:
        return (*self.held, self.partial, self.share)

    def project(self) -> Rows:
        tokens = (min(self.share_tokens, ROW_CHUNK // 4), "tokens at a time")
        merged = _row(
            "merged tokens between the linears", (2, "times"), tokens, (4 * self.spec.hidden_size, "wide"), self.size
        )
        product = _row("projected tokens of a run", tokens, self.text, self.size)
        if self.spec.projector == "pre_norm":
            run = self._normed(tokens, (4 * self.spec.hidden_size, "wide"), merged, product)
        else:
            run = max((merged, product), (product, *self._normed(tokens, self.text)), key=total_bytes)
        return (self.pixels, self.share, self._tokens(), *run)

    def gather(self) -> Rows:
        gathered = _row("tokens of all ranks", self.all_tokens, self.text, self.size)
        return (self.pixels, self._tokens(), gathered)

    def _tokens(self) -> MemoryRow:
        return _row("tokens of the share", (self.share_tokens, "tokens"), self.text, self.size)

    def _normed(self, rows: Factor, width: Factor, *then: MemoryRow) -> Rows:
        """A norm's own scratch (RMSNorm's float32 copies of a run), or its result and what comes `then`."""
        result = _row("normed rows", rows, width, self.size)
        run = (min(rows[0], NARROW_RUN), rows[1])
        inner = _row("rows normed in float32", (3 if self.is_half else 2, "times"), run, width, (4, "B"))
        during = (result, inner) if self.spec.norm == "rmsnorm" and self.on_cpu else (result,)
        return max(during, (result, *then), key=total_bytes)
