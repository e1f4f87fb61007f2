"""Admission: who gets rows of the slab, and how much work and how many bytes may be in flight.

A request gets all its runs or none, at once: nobody waits while holding rows, so nobody can wait for each other. A run
may be held by several at a time (the request until its tokens are copied out, the batch until the workers replied or
are gone); its rows are free when the last lets go.
"""

import bisect
import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from service.errors import Overloaded, RequestTooLarge
from tp.settings import LimitSettings
from tp.slab import Run

_RATE_WEIGHT = 0.2  # of the newest batch in the moving average of the drain rate


class RowAllocator:
    """First fit over the free ranges of the slab's rows, kept sorted and merged."""

    def __init__(self, num_patches: int) -> None:
        self.num_patches = num_patches
        self.num_free = num_patches
        self._free = [(0, num_patches)]  # (start, end), ascending, never touching

    def allocate(self, sizes: Sequence[int]) -> list[Run] | None:
        """One run of each size, or None and nothing taken."""
        before = list(self._free)
        runs = []
        for size in sizes:
            index = next((i for i, (start, end) in enumerate(self._free) if end - start >= size), None)
            if index is None:
                self._free = before
                return None
            start, end = self._free[index]
            runs.append(Run(start, size))
            self._free[index : index + 1] = [(start + size, end)] if start + size < end else []
        self.num_free -= sum(sizes)
        return runs

    def free(self, run: Run) -> None:
        """Give a run back; it is merged with the free ranges beside it."""
        index = bisect.bisect(self._free, (run.start, run.end))
        start, end = run.start, run.end
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index > 0 and self._free[index - 1][1] == start:
            index -= 1
            start = self._free.pop(index)[0]
        self._free.insert(index, (start, end))
        self.num_free += run.num_patches


class Rows:
    """A granted run, held by whoever may still read or write it."""

    def __init__(self, run: Run, allocator: RowAllocator) -> None:
        self.run = run
        self._allocator = allocator
        self._num_holders = 1

    def hold(self) -> None:
        """One more holder."""
        assert self._num_holders > 0, "the rows were given back already"
        self._num_holders += 1

    def release(self) -> None:
        """One holder fewer; the last one frees the rows."""
        self._num_holders -= 1
        assert self._num_holders >= 0, "the rows were released too often"
        if self._num_holders == 0:
            self._allocator.free(self.run)


@dataclass(slots=True)
class Permit:
    """What one request was granted: rows for each image, in order."""

    rows: list[Rows] = field(default_factory=list)


class HeldBytes:
    """Bytes of one request's body or answer, counted in the admission's total until they are released."""

    def __init__(self, admission: "Admission") -> None:
        self._admission = admission
        self._num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Count more bytes. Raises Overloaded when all requests together would hold too many."""
        self._admission.check_bytes(num_bytes)
        self.add_unchecked(num_bytes)

    def add_unchecked(self, num_bytes: int) -> None:
        """Count more bytes that are there already."""
        self._num_bytes += num_bytes
        self._admission.bytes_in_flight += num_bytes

    def release(self) -> None:
        """Count them no more. Idempotent."""
        self._admission.bytes_in_flight -= self._num_bytes
        self._num_bytes = 0

    def __enter__(self) -> "HeldBytes":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Admission:
    """Grants permits, or refuses at once with the reason and when to come back."""

    def __init__(self, num_patches: int, limits: LimitSettings) -> None:
        self.allocator = RowAllocator(num_patches)
        self.queued_cost = 0.0  # patch equivalents admitted and not yet answered
        self.bytes_in_flight = 0  # bodies being read, answers not yet sent
        self._limits = limits
        self._drain_rate: float | None = None  # cost a second over all groups, as measured; None before the first batch

    @contextlib.contextmanager
    def admit(self, sizes: Sequence[int], *, cost: float) -> Iterator[Permit]:
        """Rows for images of these patch counts until the block ends. Raises RequestTooLarge or Overloaded.

        `cost` is their work in patch equivalents (EncoderSpec.cost), counted as queued for as long.
        """
        total = sum(sizes)
        if total > self.allocator.num_patches:
            raise RequestTooLarge(
                f"the request's images have {total} patches in all, but only {self.allocator.num_patches} fit at once",
                numbers={"patches": total, "limit": self.allocator.num_patches},
            )
        if self.expected_wait_s() > self._limits.max_queue_s:
            raise self._overloaded(f"the queue is longer than {self._limits.max_queue_s:g} s")
        runs = self.allocator.allocate(sizes)
        if runs is None:
            raise self._overloaded(f"{total} patches do not fit beside what is in flight")
        permit = Permit([Rows(run, self.allocator) for run in runs])
        self.queued_cost += cost
        try:
            yield permit
        finally:
            self.queued_cost -= cost
            for rows in permit.rows:
                rows.release()

    def check_bytes(self, num_bytes: int) -> None:
        """Raise Overloaded if that many more bytes do not fit."""
        if self.bytes_in_flight + num_bytes > self._limits.max_inflight_bytes:
            raise self._overloaded(f"{self.bytes_in_flight} bytes of bodies and answers are in flight")

    def note_batch(self, cost: float, seconds: float, num_groups: int) -> None:
        """Learn the drain rate from a finished batch."""
        rate = cost / max(seconds, 1e-6) * num_groups
        old = self._drain_rate
        self._drain_rate = rate if old is None else old + _RATE_WEIGHT * (rate - old)

    def expected_wait_s(self) -> float:
        """Seconds until all that is queued now is done, at the measured rate; 0 while nothing was measured."""
        return self.queued_cost / self._drain_rate if self._drain_rate else 0.0

    def _overloaded(self, reason: str) -> Overloaded:
        wait_s = max(1, math.ceil(self.expected_wait_s()))
        return Overloaded(f"{reason}; try again in {wait_s} s", retry_after_s=wait_s)
