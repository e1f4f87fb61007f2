"""How long batches of each capacity tier really took, over the latest few of each.

A batch belongs to the smallest tier that holds all of its patches. `service.dispatch` notes every batch, and every
group's warm-up; GET /v1/capacity shows the result.
"""

import collections
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

WINDOW = 32  # batches of a tier that count: recent enough to follow the load, enough to be steady


@dataclass(frozen=True, slots=True)
class BatchTime:
    """One batch on the workers of a group, from its start on the slowest rank to its gathered tokens."""

    patches: int
    images: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Measured:
    """The latest `samples` batches of a tier on one group: means of a batch, and all images over all time."""

    samples: int
    mean_patches: float
    ms: float
    images_per_s: float


class TierTimes:
    """The latest batches of each of the ascending tiers."""

    def __init__(self, tiers: Sequence[int]) -> None:
        self._tiers = tuple(tiers)
        self._latest: dict[int, collections.deque[BatchTime]] = {
            tier: collections.deque(maxlen=WINDOW) for tier in self._tiers
        }

    def note(self, batch: BatchTime) -> None:
        """Count a batch. One over the top tier was admitted under other tiers, and tells nothing of these."""
        index = bisect_left(self._tiers, batch.patches)
        if index < len(self._tiers):
            self._latest[self._tiers[index]].append(batch)

    def measured(self, tier: int) -> Measured | None:
        """What the tier's batches took; None before the first."""
        batches = self._latest[tier]
        if not batches:
            return None
        seconds = sum(batch.seconds for batch in batches)
        return Measured(
            samples=len(batches),
            mean_patches=fmean(batch.patches for batch in batches),
            ms=1000 * seconds / len(batches),
            images_per_s=sum(batch.images for batch in batches) / seconds,
        )

    def under(self, tiers: Sequence[int]) -> "TierTimes":
        """The same batches, filed under other tiers."""
        other = TierTimes(tiers)
        for batches in self._latest.values():
            for batch in batches:
                other.note(batch)
        return other
