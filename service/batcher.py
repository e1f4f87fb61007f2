"""Waiting entries to batches, first come first served; every entry is settled exactly once. No I/O.

An entry is one image whose pixels are in the slab. It leaves the queue in a batch, or because its request gave it up.
A batch is the longest head of the queue that fits the top tier; an entry that was in flight when a group was lost runs
alone, so that a poison image takes nobody with it.
"""

import asyncio
import collections
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from service.admission import Rows
from service.errors import EncodeFailed, NonFiniteOutput
from service.geometry import ImagePlan
from service.record import Interval, Stage
from tp import wire
from tp.modes import Mode

MAX_LOSSES = 2  # an entry in flight at this many group losses is given up as poison


@dataclass(frozen=True, slots=True)
class EntryTimes:
    """When an entry was where, by time.monotonic, and the durations that its ranks told, in their order."""

    submitted_at: float
    began_at: float  # its batch's turn on the ranks
    settled_at: float
    replies: Sequence[wire.Done]
    mode: Mode

    @property
    def stages(self) -> dict[Stage, Interval]:
        """From the queue to the tokens in the slab, as the slowest rank had it: it waits for nobody to gather with."""
        slowest = max(self.replies, key=lambda reply: reply.forward_s)
        gathering_at = self.settled_at - slowest.all_gather_s
        return {
            "queue": (self.submitted_at, self.began_at),
            "forward": (gathering_at - slowest.forward_s, gathering_at),
            "all_gather": (gathering_at, self.settled_at),
        }

    @property
    def rank_0_forward(self) -> Interval:
        """The forward of rank 0, which begins with the others'."""
        started_at, _ = self.stages["forward"]
        return started_at, started_at + self.replies[0].forward_s


@dataclass(eq=False, slots=True)
class Entry:
    """One waiting image. Its future is its one answer: times when its tokens are in the slab, else its error."""

    plan: ImagePlan
    rows: Rows
    cost: float
    future: "asyncio.Future[EntryTimes]"
    lost_with: list[str] = field(default_factory=list)  # the incarnations of groups that were lost with it in flight
    submitted_at: float = field(default_factory=time.monotonic)

    @property
    def num_losses(self) -> int:
        """How many groups were lost with it in flight."""
        return len(self.lost_with)

    @property
    def is_wanted(self) -> bool:
        """Whether somebody still waits for the answer."""
        return not self.future.done()


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Entries that run in one forward."""

    batch_id: int
    entries: Sequence[Entry]

    @property
    def is_suspect(self) -> bool:
        """Whether a group was lost with it: then it runs with nothing else in flight, which it may take along."""
        return any(entry.num_losses for entry in self.entries)

    @property
    def num_patches(self) -> int:
        """Rows of the whole batch."""
        return sum(entry.plan.patches for entry in self.entries)

    @property
    def costs(self) -> list[float]:
        """Patch equivalents of each image."""
        return [entry.cost for entry in self.entries]

    @property
    def cost(self) -> float:
        """Patch equivalents of the whole batch."""
        return sum(self.costs)

    def as_message(self, mode: Mode = "tp") -> wire.Batch:
        """What the ranks are told."""
        return wire.Batch(
            batch_id=self.batch_id,
            mode=mode,
            images=[
                wire.BatchImage(
                    start=entry.rows.run.start, t=entry.plan.grid.t, h=entry.plan.grid.h, w=entry.plan.grid.w
                )
                for entry in self.entries
            ],
        )


class Batcher:
    """The one queue in front of all groups."""

    def __init__(self, max_patches: int) -> None:
        """`max_patches` may be changed; an entry that was admitted under a larger one then runs alone."""
        self.max_patches = max_patches
        self._queue: collections.deque[Entry] = collections.deque()
        self._has_entries = asyncio.Event()
        self._next_id = 0

    def __len__(self) -> int:
        return sum(entry.is_wanted for entry in self._queue)

    def submit(self, entries: Iterable[Entry]) -> None:
        """Append entries to the queue."""
        self._queue.extend(entries)
        self._has_entries.set()

    async def wait_for_entries(self) -> None:
        """Until the queue may hold something."""
        await self._has_entries.wait()

    @property
    def is_next_suspect(self) -> bool:
        """Whether the next batch is one that a group was lost with."""
        return next((entry.num_losses > 0 for entry in self._queue if entry.is_wanted), False)

    def take(self) -> PackedBatch | None:
        """The next batch, its rows held until `settle` or `give_back`; None if nothing wanted is waiting."""
        taken: list[Entry] = []
        room = self.max_patches
        while self._queue and len(taken) < wire.MAX_IMAGES_PER_BATCH:
            entry = self._queue[0]
            if not entry.is_wanted:
                self._queue.popleft()
                continue
            if taken and (entry.plan.patches > room or entry.num_losses or taken[0].num_losses):
                break
            taken.append(self._queue.popleft())
            room -= entry.plan.patches
        if not self._queue:
            self._has_entries.clear()
        if not taken:
            return None
        for entry in taken:
            entry.rows.hold()
        self._next_id += 1
        return PackedBatch(self._next_id, taken)

    def settle(self, batch: PackedBatch, replies: Sequence[wire.Done], mode: Mode = "tp", *, began_at: float) -> None:
        """Answer every entry of a finished batch, which ran in this mode, in its turn from `began_at` on."""
        now = time.monotonic()
        non_finite = {index for reply in replies for index in reply.non_finite}
        for index, entry in enumerate(batch.entries):
            if entry.is_wanted and index in non_finite:
                entry.future.set_exception(NonFiniteOutput("the embedding of this image holds NaN or infinity"))
            elif entry.is_wanted:
                entry.future.set_result(EntryTimes(entry.submitted_at, began_at, now, replies, mode))
            entry.rows.release()

    def give_back(self, batch: PackedBatch, incarnation: str) -> None:
        """Put the entries of a lost batch at the head of the queue, to run one at a time; give up on poison."""
        for entry in reversed(batch.entries):
            entry.lost_with.append(incarnation)
            if entry.is_wanted and entry.num_losses >= MAX_LOSSES:
                entry.future.set_exception(
                    EncodeFailed(f"the worker group was lost {entry.num_losses} times while it encoded this image")
                )
            elif entry.is_wanted:
                self._queue.appendleft(entry)
                self._has_entries.set()
            entry.rows.release()

    def fail_all(self, make_error: Callable[[], Exception]) -> None:
        """Answer everything that still waits, each with an error of its own."""
        while self._queue:
            entry = self._queue.popleft()
            if entry.is_wanted:
                entry.future.set_exception(make_error())
        self._has_entries.clear()
