"""The story of one batch: taken off the queue, run by every rank of a group, settled; after a loss, run once more.

    dispatch: queue -> batch -> every rank of a group -> settle, or bury the group and give the batch back

A batch that takes far longer than what batches took so far says hangs, and its group is lost. Made by `service.engine`,
which fills the queue.
"""

import asyncio
from collections.abc import Sequence

import numpy as np

from service.admission import Admission, Rows
from service.batcher import MAX_LOSSES, Batcher, PackedBatch
from service.errors import WorkersLost
from service.groups import WorkerGroups
from service.metrics import Metrics
from service.modes import ModeChooser
from service.tier_times import BatchTime, TierTimes
from service.transport import GroupLost, WorkerGroup
from service.waiting import first_of
from tp.settings import Settings
from tp.slab import Slab
from tp.spec import EncoderSpec

_BATCHES_IN_FLIGHT = {"cpu": 1, "cuda": 2}  # where the device computes on its own, ranks start the second one meanwhile
_GONE_TIMEOUT_S = 2.0  # ranks that are killed are gone in milliseconds
_HANG_FACTOR = 10.0  # a batch that takes so many times what the measured rate says hangs,
_HANG_FLOOR_S = 30.0  # but none is called hung before


class Dispatcher:
    """Feeds every group that is ready from the one queue, and keeps what batches took. One per engine."""

    def __init__(
        self,
        settings: Settings,
        spec: EncoderSpec,
        slab: Slab,
        *,
        batcher: Batcher,
        groups: WorkerGroups,
        admission: Admission,
        metrics: Metrics,
    ) -> None:
        self.tier_times = TierTimes(settings.capacity.patch_capacities)
        self._spec = spec
        self._slab = slab
        self._limits = settings.limits
        self._batcher = batcher
        self._groups = groups
        self._admission = admission
        self._metrics = metrics
        self._modes = ModeChooser(spec, settings.parallel.tensor)

    def take_over(self, settings: Settings) -> None:
        """Let other limits and tiers be in force for batches that are taken from now on."""
        self._limits = settings.limits
        self._batcher.max_patches = settings.capacity.max_patches_per_image
        self.tier_times = self.tier_times.under(settings.capacity.patch_capacities)

    def start(self, group: WorkerGroup) -> None:
        """Learn from what a group that is ready has measured, and feed it until it is lost."""
        self._modes.learn([ready.timings for ready in group.readiness.values()])
        slowest_s = max(ready.warm_up_s for ready in group.readiness.values())
        warm_up_patches = group.readiness[0].warm_up_patches
        self.tier_times.note(BatchTime(warm_up_patches, 1, slowest_s))
        self._admission.note_warm_up(self._spec.cost(warm_up_patches), slowest_s)
        device = group.readiness[0].device.partition(":")[0]
        turn = asyncio.Lock()
        for _ in range(_BATCHES_IN_FLIGHT[device]):
            self._groups.spawn(self.dispatch(group, turn))

    async def dispatch(self, group: WorkerGroup, turn: asyncio.Lock) -> None:
        """Feed one batch after another to a group, and settle them, until the group is lost.

        Where several do, whoever has the `turn` decides what comes next.
        """
        while not group.lost.is_set():
            async with turn:
                batch = await self._next_batch(group)
                if batch is not None and batch.is_suspect:
                    await self._run(batch, group)
                    continue
            if batch is not None:
                await self._run(batch, group)

    async def _next_batch(self, group: WorkerGroup) -> PackedBatch | None:
        """The next batch, once there is one that the group may run now; None when the group is lost."""
        await first_of(self._batcher.wait_for_entries(), group.lost.wait())
        if self._batcher.is_next_suspect:
            await first_of(group.idle.wait(), group.lost.wait())
        return None if group.lost.is_set() else self._batcher.take()

    async def _run(self, batch: PackedBatch, group: WorkerGroup) -> None:
        """Have it encoded and settle it, or bury the group and give the batch back."""
        timeout_s = self._batch_timeout_s(batch)
        choice = self._modes.choose(batch.costs)
        try:
            answer = await group.encode(batch.as_message(choice.mode), timeout_s)
        except (GroupLost, TimeoutError) as error:
            group.mark_lost(str(error) or f"a batch took over {timeout_s:.1f} s: a rank hangs", loss="hung")
            await self._give_back(batch, group)
            return
        replies = answer.replies
        self._groups.note_work()
        workers_s = max(reply.forward_s + reply.all_gather_s for reply in replies)
        self._admission.note_batch(batch.cost, workers_s)
        self._modes.note(choice.mode, batch.costs, workers_s)
        self.tier_times.note(BatchTime(batch.num_patches, len(batch.entries), workers_s))
        plans = [entry.plan for entry in batch.entries]
        self._metrics.note_batch(plans, replies, group=group.index, choice=choice)
        self._batcher.settle(batch, replies, choice.mode, began_at=answer.began_at)

    async def _give_back(self, batch: PackedBatch, group: WorkerGroup) -> None:
        """Have it run again, once nobody of the lost group writes to its rows; twice lost, it is poison."""
        lost_with = [*batch.entries[0].lost_with, group.incarnation]
        if len(lost_with) >= MAX_LOSSES:
            self._groups.excuse(lost_with)
        await first_of(group.gone.wait(), asyncio.sleep(_GONE_TIMEOUT_S))
        if not group.gone.is_set():
            await self._leave_rows(batch, group)
        self._batcher.give_back(batch, group.incarnation)

    async def _leave_rows(self, batch: PackedBatch, group: WorkerGroup) -> None:
        """Move a lost batch to other rows. Its ranks are not ours to end, and may still write to these some day."""
        left = []
        for entry in batch.entries:
            old = entry.rows.move() if entry.is_wanted else None
            if old is not None:
                await asyncio.to_thread(np.copyto, self._slab.pixels(entry.rows.run), self._slab.pixels(old.run))
            else:
                old = entry.rows
                old.hold()
                if entry.is_wanted:
                    entry.future.set_exception(WorkersLost("a worker group was lost"))
            left.append(old)
        self._groups.spawn(_release_when(group.gone, left))

    def _batch_timeout_s(self, batch: PackedBatch) -> float:
        """After which it is called hung."""
        limit_s = self._limits.batch_timeout_s
        expected_s = self._admission.expected_batch_s(batch.cost)
        return limit_s if expected_s is None else min(limit_s, max(_HANG_FLOOR_S, _HANG_FACTOR * expected_s))


async def _release_when(event: asyncio.Event, held: Sequence[Rows]) -> None:
    await event.wait()
    for rows in held:
        rows.release()
