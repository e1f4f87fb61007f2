"""The queue: first come first served within the top tier, every entry settled once."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from service.admission import RowAllocator, Rows
from service.batcher import Batcher, Entry, EntryTimes
from service.errors import EncodeFailed, NonFiniteOutput, NotReady
from service.geometry import plan_image
from tp import wire
from tp.spec import PUBLISHED_K3

ALLOCATOR = RowAllocator(4096)


def entry(num_patches: int) -> Entry:
    plan = plan_image(28 * (num_patches // 4), 28, PUBLISHED_K3.processor, [1024], "refuse")
    (run,) = ALLOCATOR.allocate([num_patches]) or []
    return Entry(plan, Rows(run, ALLOCATOR), float(num_patches), asyncio.get_running_loop().create_future())


def done(batch_id: int, *non_finite: int) -> list[wire.Done]:
    return [wire.Done(batch_id=batch_id, non_finite=list(non_finite), forward_s=0.5, all_gather_s=0.1)]


def on_a_loop(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(test())  # type: ignore[arg-type]

    run.__name__ = test.__name__
    return run


@on_a_loop
async def test_a_batch_is_the_longest_head_that_fits() -> None:
    batcher = Batcher(max_patches=16)
    entries = [entry(8), entry(4), entry(8), entry(4)]
    batcher.submit(entries)
    first, second = batcher.take(), batcher.take()
    assert first and second
    assert list(first.entries) == entries[:2]
    assert list(second.entries) == entries[2:]
    assert batcher.take() is None


@on_a_loop
async def test_what_was_admitted_under_a_larger_top_tier_runs_alone() -> None:
    batcher = Batcher(max_patches=64)
    small, large, last = entry(8), entry(32), entry(4)
    batcher.submit([small, large, last])
    batcher.max_patches = 16
    batches = [batcher.take() for _ in range(3)]
    assert [list(batch.entries) for batch in batches if batch] == [[small], [large], [last]]
    assert batcher.take() is None


@on_a_loop
async def test_an_unwanted_entry_is_skipped() -> None:
    batcher = Batcher(max_patches=16)
    gone, wanted = entry(8), entry(8)
    batcher.submit([gone, wanted])
    gone.future.cancel()
    batch = batcher.take()
    assert batch and list(batch.entries) == [wanted]


@on_a_loop
async def test_settling_answers_each_and_frees_the_rows() -> None:
    free = ALLOCATOR.num_free
    batcher = Batcher(max_patches=16)
    good, bad = entry(8), entry(8)
    batcher.submit([good, bad])
    batch = batcher.take()
    assert batch
    batcher.settle(batch, done(batch.batch_id, 1), "dp", began_at=1.5)
    times = await good.future
    assert (times.submitted_at, times.began_at, times.mode) == (good.submitted_at, 1.5, "dp")
    with pytest.raises(NonFiniteOutput):
        await bad.future
    for each in (good, bad):
        each.rows.release()
    assert ALLOCATOR.num_free == free


@on_a_loop
async def test_a_lost_batch_runs_again_one_by_one_and_poison_is_given_up() -> None:
    batcher = Batcher(max_patches=16)
    good, poison, later = entry(4), entry(4), entry(4)
    batcher.submit([good, poison])
    lost = batcher.take()
    assert lost and not lost.is_suspect
    batcher.submit([later])
    batcher.give_back(lost, "first")
    assert batcher.is_next_suspect
    alone = batcher.take()
    assert alone and list(alone.entries) == [good] and alone.is_suspect
    batcher.settle(alone, done(alone.batch_id), began_at=0)
    assert good.future.done()
    second = batcher.take()
    assert second and list(second.entries) == [poison]
    batcher.give_back(second, "second")
    with pytest.raises(EncodeFailed):
        await poison.future
    assert poison.lost_with == ["first", "second"]
    assert not batcher.is_next_suspect
    rest = batcher.take()
    assert rest and list(rest.entries) == [later]


@on_a_loop
async def test_whoever_waits_when_everything_fails_is_told() -> None:
    batcher = Batcher(max_patches=16)
    waiting = entry(4)
    batcher.submit([waiting])
    batcher.fail_all(lambda: NotReady("stopping"))
    with pytest.raises(NotReady):
        await waiting.future
    assert len(batcher) == 0


def test_stages_are_the_slowest_ranks_and_end_together() -> None:
    replies = [
        wire.Done(batch_id=1, non_finite=[], forward_s=2.0, all_gather_s=1.25),  # waits a second for the other
        wire.Done(batch_id=1, non_finite=[], forward_s=3.0, all_gather_s=0.25),
    ]
    times = EntryTimes(submitted_at=5.0, began_at=6.5, settled_at=10.0, replies=replies, mode="tp")
    assert times.stages == {"queue": (5.0, 6.5), "forward": (6.75, 9.75), "all_gather": (9.75, 10.0)}
    assert times.rank_0_forward == (6.75, 8.75)
