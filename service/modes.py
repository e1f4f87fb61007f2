"""Chooses tensor- or data-parallel for each batch, by what each mode is predicted to take.

A mode's time is a line: a + b * cost, where cost is the batch's for "tp" and the most loaded rank's for "dp", in patch
equivalents (`EncoderSpec.cost`). Ranks time two batches in both modes before they are ready; every batch after that
moves its mode's line. Errors count relative to the time taken, and old batches fade. No I/O; called by
service/dispatch.py.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tp import wire
from tp.modes import Mode, makespan
from tp.spec import EncoderSpec

_FADING = 0.98  # of a batch's weight, with each later one of its mode


@dataclass(frozen=True, slots=True)
class Choice:
    """The mode of a batch, and the seconds that each mode was predicted to take; none where there is no choice."""

    mode: Mode
    predicted_s: Mapping[Mode, float]


@dataclass(slots=True)
class Line:
    """seconds = a + b * cost with a, b >= 0, by least squares of relative errors over points that fade."""

    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)  # of w, w x, w x^2, w y, w x y, with w = 1 / y^2

    def add(self, cost: float, seconds: float) -> None:
        """One more point."""
        weight = 1 / max(seconds, 1e-6) ** 2
        point = (1.0, cost, cost * cost, seconds, cost * seconds)
        self._sums = [_FADING * total + weight * value for total, value in zip(self._sums, point, strict=True)]

    def at(self, cost: float) -> float | None:
        """Predicted seconds; None without a point."""
        ones, x, xx, y, xy = self._sums
        if not ones:
            return None
        spread = ones * xx - x * x
        slope = (ones * xy - x * y) / spread if spread > 1e-9 * ones * xx else xy / xx
        start = (y - slope * x) / ones
        if start < 0:
            return xy / xx * cost
        return start + slope * cost if slope > 0 else y / ones


class ModeChooser:
    """One for all groups: they run on equal devices."""

    def __init__(self, spec: EncoderSpec, world_size: int) -> None:
        self._spec = spec
        self._world_size = world_size
        self._lines: dict[Mode, Line] = {}

    def learn(self, timings: Iterable[Sequence[wire.Timing]]) -> None:
        """Start from what each rank of a group measured: nothing on a shard. Later groups change nothing."""
        if self._lines:
            return
        for same in zip(*timings, strict=True):
            slowest = max(same, key=lambda timing: timing.seconds)  # a batch ends with its last rank
            self._lines.setdefault(slowest.mode, Line())
            self.note(slowest.mode, [self._spec.cost(slowest.num_patches)] * slowest.num_images, slowest.seconds)

    def choose(self, costs: Sequence[float]) -> Choice:
        """The quicker mode for a batch of images of these costs."""
        predicted = {mode: line.at(self._load(mode, costs)) for mode, line in self._lines.items()}
        known = {mode: seconds for mode, seconds in predicted.items() if seconds is not None}
        return Choice(min(known, key=known.__getitem__, default="tp"), known)

    def note(self, mode: Mode, costs: Sequence[float], seconds: float) -> None:
        """A batch of images of these costs took so long in this mode."""
        if mode in self._lines:
            self._lines[mode].add(self._load(mode, costs), seconds)

    def _load(self, mode: Mode, costs: Sequence[float]) -> float:
        return sum(costs) if mode == "tp" else makespan(costs, self._world_size)
