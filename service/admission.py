"""Admission: who gets rows of the slab, and how much work and how many bytes may be in flight.

A request gets all its runs or none, at once: nobody waits while holding rows, so nobody can wait for each other. A run
may be held by several at a time (the request until its tokens are copied out, the batch until the workers replied or
are gone); its rows are free when the last lets go.
"""

import bisect
import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from service.errors import Overloaded, RequestTooLarge
from tp.settings import LimitSettings
from tp.slab import Run

_AVERAGE_S = 10.0  # time constant of all averages
_LONGEST_RETRY_S = 600
_COST_FLOOR = 1024.0  # what a smaller batch takes is overhead, and tells nothing about a larger one
_OVERLOAD_S = 10.0  # an overload is taken to go on for so long, and for as long as it has lasted,
_MAX_LASTED_S = 30.0  # up to that
_MAX_FACTOR = 4.0  # of what can be done; of what arrives beyond, most did not wait for as long as they were told


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

    def has_room(self, size: int) -> bool:
        """Whether a run of that size is free."""
        return any(end - start >= size for start, end in self._free)

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

    def move(self) -> "Rows | None":
        """Let all holders hold another free run instead; the run that they had, with one holder of its own.

        None, and nothing done, where no run of that size is free.
        """
        runs = self._allocator.allocate([self.run.num_patches])
        if runs is None:
            return None
        left = Rows(self.run, self._allocator)
        (self.run,) = runs
        return left

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


class Rate:
    """A rate of work, cost a second, averaged over about the last ten seconds of work."""

    def __init__(self) -> None:
        self._cost = 0.0
        self._seconds = 0.0

    def add(self, cost: float, seconds: float) -> None:
        """Note work of `cost` that took `seconds`."""
        kept = math.exp(-seconds / _AVERAGE_S)
        self._cost = kept * self._cost + cost
        self._seconds = kept * self._seconds + seconds

    @property
    def per_s(self) -> float:
        """Work a second; that of less than a second counts as a second's."""
        return self._cost / max(1.0, self._seconds)

    def seconds_for(self, cost: float) -> float | None:
        """How long that much work takes; None before the first measurement."""
        return cost * self._seconds / self._cost if self._cost and self._seconds else None


class Admission:
    """Grants permits, or refuses at once with the reason and when to come back.

    Work is counted in patch equivalents (EncoderSpec.cost). `Retry-After` is the time until what is queued and what was
    promised to others that were refused is done, at the measured rate. While more arrives than is done it is half as
    long again, and for as long as that has lasted beyond, since it will go on: those who come back into it have to
    share with those who come first. A client that comes back early looks like a new one, so promises do not count in
    full while far more arrives than could be new.
    """

    def __init__(self, num_patches: int, limits: LimitSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self.allocator = RowAllocator(num_patches)
        self.queued_cost = 0.0  # admitted and not yet answered
        self._num_admitted = 0
        self.bytes_in_flight = 0  # bodies being read, answers not yet sent
        self.limits = limits  # may be changed; what is granted stays granted
        self._clock = clock
        self._drained = Rate()  # answered work over the time in which there was any
        self._encoded = Rate()  # batches over the time that they took on the workers
        self._drained_until = clock()
        self._busy_since = clock()
        self._offered = Rate()  # work that arrived since then
        self._recent_cost = 0.0  # decaying sum of all that arrived
        self._offered_at = clock()
        self._promised: dict[int, float] = {}  # cost by the second in which refused clients were told to return

    @contextlib.contextmanager
    def admit(self, sizes: Sequence[int], *, cost: float) -> Iterator[Permit]:
        """Rows for images of these patch counts until the block ends. Raises RequestTooLarge or Overloaded."""
        self.check_size(sizes)
        self._note_offer(cost)
        if self.expected_wait_s() > self.limits.max_queue_s:
            raise self._overloaded(f"the queue is longer than {self.limits.max_queue_s:g} s", cost)
        runs = self.allocator.allocate(sizes)
        if runs is None:
            raise self._overloaded(f"{sum(sizes)} patches do not fit beside what is in flight", cost)
        if self._num_admitted == 0:
            self._drained_until = self._clock()  # there was nothing to do until now
        permit = Permit([Rows(run, self.allocator) for run in runs])
        self._num_admitted += 1
        self.queued_cost += cost
        try:
            yield permit
        finally:
            self._num_admitted -= 1
            self.queued_cost = self.queued_cost - cost if self._num_admitted else 0.0  # floats may leave a rest
            for rows in permit.rows:
                rows.release()

    def check_size(self, sizes: Sequence[int]) -> None:
        """Raise RequestTooLarge for images that an empty slab could not hold together."""
        total = sum(sizes)
        if total > self.allocator.num_patches:
            raise RequestTooLarge(
                f"the request's images have {total} patches in all, but only {self.allocator.num_patches} fit at once",
                numbers={"patches": total, "limit": self.allocator.num_patches},
            )

    def check_bytes(self, num_bytes: int) -> None:
        """Raise Overloaded if that many more bytes do not fit."""
        if self.bytes_in_flight + num_bytes > self.limits.max_inflight_bytes:
            raise self._overloaded(f"{self.bytes_in_flight} bytes of bodies and answers are in flight", 0.0)

    def note_warm_up(self, cost: float, seconds: float) -> None:
        """Begin with what an image took before any was asked for, where nothing is known yet."""
        for rate in (self._encoded, self._drained):
            if rate.seconds_for(cost) is None:
                rate.add(cost, seconds)

    def note_batch(self, cost: float, seconds: float) -> None:
        """Learn from a batch that has just finished and took `seconds` on the workers."""
        now = self._clock()
        self._encoded.add(cost, seconds)  # without a floor: who calls a batch hung must rather wait for too long
        self._drained.add(max(cost, _COST_FLOOR), now - self._drained_until)
        self._drained_until = now

    def expected_wait_s(self) -> float:
        """Seconds until all that is queued now is done; 0 while nothing was measured."""
        return self._drain_s(self.queued_cost)

    def expected_batch_s(self, cost: float) -> float | None:
        """Seconds that a batch takes on the workers; None while nothing was measured."""
        return self._encoded.seconds_for(cost)

    def _overloaded(self, reason: str, cost: float) -> Overloaded:
        now = self._clock()
        self._promised = {due: promised for due, promised in self._promised.items() if due > now}
        overload = min(1.0, max(0.0, self._drain_s(self._offered.per_s) - 1))
        expected_s = self._drain_s(self.queued_cost + sum(self._promised.values())) * (1 + overload / 2)
        expected_s += overload * (_OVERLOAD_S + min(now - self._busy_since, _MAX_LASTED_S))
        wait_s = min(max(1, math.ceil(expected_s)), _LONGEST_RETRY_S)
        due = math.ceil(now + wait_s)
        self._promised[due] = self._promised.get(due, 0.0) + cost * self._share_of_new()
        return Overloaded(f"{reason}; try again in {wait_s} s", retry_after_s=wait_s)

    def _note_offer(self, cost: float) -> None:
        now = self._clock()
        since_s, self._offered_at = now - self._offered_at, now
        self._recent_cost = self._recent_cost * math.exp(-since_s / _AVERAGE_S) + cost
        if self._num_admitted == 0:
            self._busy_since, self._offered, since_s = now, Rate(), 0.0
        self._offered.add(cost, since_s)

    def _share_of_new(self) -> float:
        """Of those who arrive, how many may be new, as far as one can tell."""
        factor = self._drain_s(self._recent_cost) / _AVERAGE_S
        return 1.0 if factor <= _MAX_FACTOR else ((_MAX_FACTOR - 1) / (factor - 1)) ** 2

    def _drain_s(self, cost: float) -> float:
        """Seconds in which that much work is answered; 0 while nothing was measured."""
        return self._drained.seconds_for(cost) or 0.0
