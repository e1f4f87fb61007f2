"""`tpvision bench tower`: how fast the encoder is, against this machine's matrix product and against stock torch.

    start all contenders -> for each batch: warm up, then rounds of one run a contender -> a row for each

All contenders stay loaded and are run in turn, so that a machine that slows down slows all of them. A run is as many
forwards as fill `run_s` (the kernel counts CPU in hundredths of a second); a time is the median of its rounds. The
baseline is one process with all threads and nothing but stock torch.
"""

import contextlib
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import get_args

from service.bench.contenders import BASELINE, Exchange, Kind, contenders
from service.bench.entrants import Entrant, Lap, entered, largest
from service.bench.report import Column, Header, Report, number
from service.bench.usage import MAX_REPEATS, Watched, undisturbed, worst
from service.modes import Choice, ModeChooser
from tp.bench.messages import Rates
from tp.checkpoint import check_tensors, read_vision_tensors
from tp.modes import Mode
from tp.settings import Settings
from tp.spec import EncoderSpec, read_spec

_PROBE_PATCHES = 256
_LONG_S = 30.0  # a forward that will take longer is run once, without warm-up,
_VERY_LONG_S = 300.0  # and beyond this it is not repeated where others disturb it, only marked
_PRODUCT_SHARE = 0.3  # of a run, for each of a block's four matrix products in every round


@dataclass(frozen=True, slots=True)
class Row:
    """One contender on one batch. Times are of one forward; rates are FLOP/s."""

    batch: str
    contender: str
    world_size: int
    copies: int
    device: str  # in words
    threads: int
    attention: str  # the kernel, in words
    collectives: str  # what carries sums between its ranks, in words
    mode: Mode
    dtype: str
    num_images: int
    patches: int  # of the largest image
    seconds: float
    fastest_s: float
    slowest_s: float
    num_forwards: int  # in a run
    num_rounds: int
    flops: int
    product_rate: float  # the best of a block's four matrix products, in the same rounds, times GPUs
    product_rates: dict[str, float]
    baseline_s: float | None
    predicted_s: float  # the contender's first batch, scaled by the formula
    chooser_s: float | None  # what a service's mode chooser predicts of it, where there are two modes
    is_chosen: bool  # whether it would run the batch so
    weights_bytes: int  # of the largest rank, as are the next two
    peak_growth_bytes: int | None  # RssAnon + RssShmem over what it held before its first forward
    torch_peak_bytes: int | None  # tensors, as torch counts them
    others_share: float  # CPU of others, in the most disturbed round
    is_disturbed: bool

    @property
    def rate(self) -> float:
        """FLOP/s by the formula of `EncoderSpec.flops`."""
        return self.flops / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: the rate over that of the best matrix product."""
        return self.rate / self.product_rate

    @property
    def images_per_s(self) -> float:
        """Images a second."""
        return self.num_images / self.seconds

    @property
    def speedup(self) -> float | None:
        """Over the baseline."""
        return None if self.baseline_s is None else self.baseline_s / self.seconds

    @property
    def mark(self) -> str:
        """What a reader must know of the row."""
        return " ".join(["chosen"] * self.is_chosen + ["disturbed"] * self.is_disturbed)


COLUMNS = (
    Column("batch", "batch"),
    Column("contender", "contender"),
    Column("world_size"),
    Column("copies"),
    Column("device"),
    Column("threads"),
    Column("attention"),
    Column("collectives"),
    Column("mode"),
    Column("dtype"),
    Column("num_images"),
    Column("patches"),
    Column("seconds", "s", number("{:.4g}")),
    Column("predicted_s", "formula", number("{:.4g}")),
    Column("chooser_s", "chooser", number("{:.4g}")),
    Column("is_chosen"),
    Column("fastest_s"),
    Column("slowest_s"),
    Column("num_forwards"),
    Column("num_rounds", "rounds"),
    Column("flops"),
    Column("rate", "GFLOP/s", number("{:.1f}", 1e9)),
    Column("product_rate", "GEMM", number("{:.1f}", 1e9)),
    Column("product_rates"),
    Column("mfu", "MFU", number("{:.1%}")),
    Column("images_per_s", "images/s", number("{:.3g}")),
    Column("speedup", "x stock", number("{:.2f}")),
    Column("baseline_s"),
    Column("weights_bytes"),
    Column("peak_growth_bytes", "peak MB", number("{:,.0f}", 1e6)),
    Column("torch_peak_bytes", "tensors MB", number("{:,.0f}", 1e6)),
    Column("others_share", "others", number("{:.1%}")),
    Column("is_disturbed"),
    Column("mark", "", in_json=False),
)
_NOTES = (
    "s: median time of one forward; formula: the contender's first batch scaled by FLOPs; GEMM: the best of a block's "
    "four matrix products over as many rows, all threads or GPUs, in the same rounds; MFU: GFLOP/s over GEMM.",
    "peak MB: growth of the largest rank's private and shared memory over what it held with its weights; tensors MB: "
    "the same as torch counts it; others: CPU that other processes used.",
)


def bench_tower(
    settings: Settings,
    batches: Sequence[Sequence[int]],
    world_sizes: Sequence[int],
    exchanges: Sequence[Exchange],
    *,
    rounds: int,
    run_s: float,
    times_baseline: bool = True,
    has_graphs: bool = False,
    ablates: bool = False,
    on_step: Callable[[str], None] = lambda step: None,
) -> Report:
    """Time the encoder of `settings.model.path` on every batch (patches of its images), in the given order.

    Raises SpecError, CheckpointError, or BenchError when a rank cannot be started or ends.
    """
    header = Header.of_this_machine()
    assert settings.model.path is not None, "the command names a folder"
    spec = read_spec(settings.model.path)
    check_tensors(spec, read_vision_tensors(settings.model.path, spec))
    with contextlib.ExitStack() as stack:
        entrants = []
        for contender in contenders(
            settings,
            spec,
            world_sizes,
            exchanges,
            num_cores=len(os.sched_getaffinity(0)),
            has_many_images=any(len(patches) > 1 for patches in batches),
            has_graphs=has_graphs,
            ablates=ablates,
        ):
            on_step(f"starting {contender.name}")
            entrants.append(stack.enter_context(entered(contender)))
        choosers = {}
        for entrant in entrants:
            if entrant.contender.mode == "dp":
                on_step(f"{entrant.contender.name}: fitting the mode chooser")
                choosers[entrant.contender.kind] = entrant.fit_chooser(spec)
        race = Race(
            spec, entrants, choosers, rounds=rounds, run_s=run_s, times_baseline=times_baseline, on_step=on_step
        )
        for patches in batches:
            on_step(f"timing {label(patches)} patches")
            race.run(patches)
        on_step("counting tensors")
        rows = race.rows()
    return Report("tpvision bench tower", header, COLUMNS, rows, (*_NOTES, *_chooser_note(rows)))


def label(patches: Sequence[int]) -> str:
    """A batch, in words."""
    if len(patches) == 1:
        return f"{patches[0]:,}"
    return " + ".join(f"{count} x {size:,}" for size, count in Counter(patches).items())


class Race:
    """Runs every batch on every contender in turn, and keeps what they took."""

    def __init__(
        self,
        spec: EncoderSpec,
        entrants: Sequence[Entrant],
        choosers: Mapping[Kind, ModeChooser],
        *,
        rounds: int,
        run_s: float,
        times_baseline: bool,
        on_step: Callable[[str], None] = lambda step: None,
    ) -> None:
        self._spec = spec
        self._on_step = on_step
        self._multiplier = entrants[0]  # one process with all threads
        self._entrants = entrants if times_baseline else entrants[1:]
        self._choosers = choosers
        self._rounds = rounds
        self._run_s = run_s
        self._results: list[_Result] = []
        for entrant in self._entrants:
            probe = [_PROBE_PATCHES] * entrant.contender.images_at_once
            entrant.warm_up(probe, self._flops(probe))

    def run(self, patches: Sequence[int]) -> None:
        """Time one batch."""
        flops = self._flops(patches)
        entrants = [entrant for entrant in self._entrants if entrant.contender.takes(patches)]
        is_long = any(flops / entrant.rate > _LONG_S for entrant in entrants)
        if not is_long:
            for entrant in entrants:
                entrant.warm_up(patches, flops)
        products: list[Rates] = []
        laps: dict[str, list[Watched[Lap]]] = {entrant.contender.name: [] for entrant in entrants}
        for _ in range(1 if is_long else self._rounds):
            products.append(
                undisturbed(partial(self._multiplier.multiply, sum(patches), _PRODUCT_SHARE * self._run_s)).result
            )
            for entrant in entrants:
                repeats = 0 if flops / entrant.rate > _VERY_LONG_S else MAX_REPEATS
                lap = undisturbed(partial(entrant.lap, patches, flops, self._run_s), max_repeats=repeats)
                laps[entrant.contender.name].append(lap)
                about = f"{lap.result.seconds:.3g} s, others {lap.others_share:.1%}, run {lap.num_runs} times"
                self._on_step(f"{label(patches)} patches, {entrant.contender.name}: {about}")
        for entrant in entrants:
            result = _Result(entrant, patches, flops, laps[entrant.contender.name], products, is_long)
            entrant.rate = flops / result.seconds
            self._results.append(result)

    def rows(self) -> list[Row]:
        """One for each batch and contender. Tensors are counted only now: the profiler leaves memory of its own."""
        firsts: dict[str, _Result] = {}
        baselines = {tuple(result.patches): result.seconds for result in self._results if result.name == BASELINE}
        rows = []
        for result in self._results:
            first = firsts.setdefault(result.name, result)
            rows.append(result.row(self._spec, first, baselines.get(tuple(result.patches)), self._choice(result)))
        return rows

    def _choice(self, result: "_Result") -> Choice | None:
        """Between the two modes of one group, where the batch can be run in both."""
        contender, patches = result.entrant.contender, result.patches
        chooser = self._choosers.get(contender.kind)
        if chooser is None or len(patches) < contender.world_size:
            return None
        return chooser.choose([self._spec.cost(count) for count in patches])

    def _flops(self, patches: Sequence[int]) -> int:
        return sum(map(self._spec.flops, patches))


@dataclass(frozen=True, slots=True)
class _Result:
    """All laps of one contender on one batch, and the matrix products between them."""

    entrant: Entrant
    patches: Sequence[int]
    flops: int
    laps: Sequence[Watched[Lap]]
    products: Sequence[Rates]
    is_long: bool

    @property
    def name(self) -> str:
        return self.entrant.contender.name

    @property
    def seconds(self) -> float:
        return median(lap.result.seconds for lap in self.laps)

    def row(self, spec: EncoderSpec, first: "_Result", baseline_s: float | None, choice: Choice | None) -> Row:
        contender = self.entrant.contender
        hellos = [rank.hello for rank in self.entrant.ranks]
        seconds = [lap.result.seconds for lap in self.laps]
        growths = [lap.result.peak_growth_bytes for lap in self.laps]
        return Row(
            batch=label(self.patches),
            contender=contender.name,
            world_size=contender.world_size,
            copies=contender.copies,
            device=hellos[0].device,
            threads=hellos[0].threads,
            attention=hellos[0].attention,
            collectives=hellos[0].collectives,
            mode=contender.mode,
            dtype=contender.settings.compute_dtype(spec),
            num_images=len(self.patches),
            patches=max(self.patches),
            seconds=self.seconds,
            fastest_s=min(seconds),
            slowest_s=max(seconds),
            num_forwards=self.laps[0].result.num_forwards,
            num_rounds=len(self.laps),
            flops=self.flops,
            product_rate=median(rates.best for rates in self.products) * self.entrant.num_gpus,
            product_rates={
                name: median(rates.flops_per_s[name] for rates in self.products)
                for name in self.products[0].flops_per_s
            },
            baseline_s=baseline_s,
            predicted_s=first.seconds * self.flops / first.flops,
            chooser_s=None if choice is None else choice.predicted_s[contender.mode],
            is_chosen=choice is not None and choice.mode == contender.mode,
            weights_bytes=max(hello.weights_bytes for hello in hellos),
            peak_growth_bytes=largest(growths),
            torch_peak_bytes=None if self.is_long else self.entrant.count_tensors(self.patches),
            others_share=worst(self.laps).others_share,
            is_disturbed=worst(self.laps).is_disturbed,
        )


def _chooser_note(rows: Sequence[Row]) -> list[str]:
    """What the chooser's choices cost against the better mode, over all batches that can be run in both."""
    groups: dict[tuple[str, int], list[Row]] = defaultdict(list)
    for row in rows:
        if row.chooser_s is not None:
            groups[row.batch, row.world_size].append(row)
    losses = [
        sum(row.seconds for row in modes if row.is_chosen) / min(row.seconds for row in modes) - 1
        for modes in groups.values()
        if len(modes) == len(get_args(Mode))
    ]
    if not losses:
        return []
    return [
        "chooser: what a service's mode chooser predicts, fitted before the first batch; chosen: the mode it would "
        f"take, which took at most {max(losses):.1%} longer than the better one, over {len(losses)} batch(es)."
    ]
