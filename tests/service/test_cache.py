"""The content cache alone: what it keeps, in how many bytes, and who computes what when several want the same."""

import asyncio
import tracemalloc
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import numpy as np
import pytest

from service.cache import OVERHEAD_BYTES, ContentCache, ItemError, ItemTokens, Resolved
from service.errors import NotReady, Overloaded, ServiceError, UndecodableImage
from service.geometry import Fit, ImagePlan

Compute = Callable[[Sequence[int]], Awaitable[list[ItemTokens]]]
PLAN = ImagePlan((64, 48), Fit(64, 48, 14), 64, (64, 48))
ENTRY_BYTES = 1000 + OVERHEAD_BYTES


def tokens(num_bytes: int = 1000) -> ItemTokens:
    return ItemTokens(PLAN, np.zeros((1, num_bytes), np.uint8))


def run(work: Coroutine[Any, Any, None]) -> None:
    async def main() -> None:
        async with asyncio.timeout(10):
            await work

    asyncio.run(main())


async def put(cache: ContentCache, *keys: bytes, num_bytes: int = 1000) -> Resolved:
    async def compute(indexes: Sequence[int]) -> list[ItemTokens]:
        return [tokens(num_bytes) for _ in indexes]

    return await cache.resolve(keys, compute)


class Held:
    """A computation that ends when the test says so, with what it says."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.ends: list[asyncio.Future[None]] = []

    async def compute(self, indexes: Sequence[int]) -> list[ItemTokens]:
        self.calls.append(list(indexes))
        self.ends.append(asyncio.get_running_loop().create_future())
        await self.ends[-1]
        return [tokens() for _ in indexes]

    def start(self, cache: ContentCache, *keys: bytes) -> "asyncio.Task[Resolved]":
        return asyncio.create_task(cache.resolve(keys, self.compute))


async def settle() -> None:
    """Until every task waits for something that the test has to do."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_what_was_used_least_recently_makes_room() -> None:
    async def use() -> None:
        cache = ContentCache(3 * ENTRY_BYTES)
        for key in (b"a", b"b", b"c", b"a", b"d"):  # b is the oldest when d comes
            await put(cache, key)
        assert (cache.num_misses, cache.num_hits, cache.num_evictions) == (4, 1, 1)
        assert (len(cache), cache.num_bytes) == (3, 3 * ENTRY_BYTES)
        assert (await put(cache, b"a", b"c", b"d")).num_cached == 3
        assert (await put(cache, b"b")).num_cached == 0

    run(use())


def test_one_large_entry_drops_as_many_as_it_needs() -> None:
    async def use() -> None:
        cache = ContentCache(3 * ENTRY_BYTES)
        await put(cache, b"a", b"b", b"c")
        await put(cache, b"large", num_bytes=1000 + ENTRY_BYTES)
        assert (len(cache), cache.num_bytes, cache.num_evictions) == (2, 3 * ENTRY_BYTES, 2)
        assert (await put(cache, b"c", b"large")).num_cached == 2

    run(use())


def test_what_is_larger_than_the_budget_is_not_kept_and_drops_nothing() -> None:
    async def use() -> None:
        cache = ContentCache(ENTRY_BYTES)
        await put(cache, b"a")
        assert len((await put(cache, b"large", num_bytes=1001)).tokens) == 1
        assert (len(cache), cache.num_bytes, cache.num_evictions) == (1, ENTRY_BYTES, 0)

    run(use())


def test_a_smaller_budget_drops_the_oldest_and_none_drops_all() -> None:
    async def use() -> None:
        cache = ContentCache(3 * ENTRY_BYTES)
        await put(cache, b"a", b"b", b"c")
        cache.resize(2 * ENTRY_BYTES - 1)
        assert (await put(cache, b"c")).num_cached == 1
        assert (len(cache), cache.num_bytes) == (1, ENTRY_BYTES)
        cache.resize(0)
        await put(cache, b"a")
        assert (len(cache), cache.num_bytes) == (0, 0)

    run(use())


def test_the_overhead_covers_what_python_needs_and_not_much_more() -> None:
    async def use() -> float:
        cache = ContentCache(2**30)
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        for number in range(500):
            size = (1000 + number, 2000 + number)
            item = ItemTokens(ImagePlan(size, Fit(*size, 14), 16384, size), np.zeros((1, 4096), np.uint8))

            async def compute(indexes: Sequence[int], item: ItemTokens = item) -> list[ItemTokens]:
                return [item.copy()]

            await cache.resolve([number.to_bytes(32, "big")], compute)
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return (after - before) / 500 - 4096

    assert OVERHEAD_BYTES / 4 < asyncio.run(use()) < OVERHEAD_BYTES


def test_a_hit_is_the_kept_array_itself_which_nobody_may_write_to() -> None:
    copied = tokens().copy()
    with pytest.raises(ValueError, match="read-only"):
        copied.values[0, 0] = 1

    async def use() -> None:
        cache = ContentCache(2**20)
        first, second = await put(cache, b"a"), await put(cache, b"a")
        assert first.tokens[0] is second.tokens[0]

    run(use())


def test_all_who_want_the_same_at_once_wait_for_one() -> None:
    async def use() -> None:
        cache, held = ContentCache(0), Held()  # and nothing has to be kept for it
        waiting = [held.start(cache, b"a") for _ in range(10)]
        await settle()
        held.ends[0].set_result(None)
        found = [await each for each in waiting]
        assert held.calls == [[0]]
        assert len({id(each.tokens[0]) for each in found}) == 1
        assert sorted(each.num_coalesced for each in found) == [0] + [1] * 9
        assert (cache.num_misses, cache.num_coalesced, cache.num_hits) == (1, 9, 0)

    run(use())


def test_a_request_computes_its_own_once_and_takes_the_rest_from_others() -> None:
    async def use() -> None:
        cache, held = ContentCache(2**20), Held()
        await put(cache, b"kept")
        other = held.start(cache, b"other")
        await settle()
        mine = held.start(cache, b"new", b"kept", b"other", b"new", b"newer")
        await settle()
        assert held.calls == [[0], [0, 4]]
        held.ends[1].set_result(None)
        await settle()
        assert not mine.done()
        held.ends[0].set_result(None)
        found = await mine
        assert (found.num_cached, found.num_coalesced) == (1, 2)
        assert found.tokens[2] is (await other).tokens[0]
        assert found.tokens[0] is found.tokens[3]

    run(use())


def test_requests_that_wait_for_each_other_both_end() -> None:
    async def use() -> None:
        cache, held = ContentCache(0), Held()
        one, other = held.start(cache, b"a", b"c"), held.start(cache, b"b")
        await settle()
        third = held.start(cache, b"c", b"b", b"d", b"a")
        await settle()
        for end in reversed(held.ends):
            end.set_result(None)
            await settle()
        assert [len((await each).tokens) for each in (one, other, third)] == [2, 1, 4]
        assert held.calls == [[0, 1], [0], [2]]

    run(use())


def test_when_a_client_leaves_one_of_those_who_wait_takes_over() -> None:
    async def use() -> None:
        cache, held = ContentCache(0), Held()
        leader, *others = (held.start(cache, b"a") for _ in range(4))
        await settle()
        leader.cancel()
        await settle()
        assert held.calls == [[0], [0]]
        held.ends[1].set_result(None)
        assert sorted([(await each).num_coalesced for each in others]) == [0, 1, 1]
        assert (cache.num_misses, cache.num_coalesced) == (2, 2)

    run(use())


def test_who_waits_gives_up_at_its_own_deadline() -> None:
    async def use() -> None:
        cache, held = ContentCache(0), Held()
        leader = held.start(cache, b"a")
        await settle()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await cache.resolve([b"a"], held.compute)
        held.ends[0].set_result(None)
        assert len((await leader).tokens) == 1

    run(use())


@pytest.mark.parametrize("error", [Overloaded("full"), TimeoutError(), ItemError(0, NotReady("stopping"))])
def test_what_is_wrong_with_a_request_is_its_own(error: Exception) -> None:
    async def use() -> None:
        cache, held = ContentCache(0), Held()
        leader, other = held.start(cache, b"a"), held.start(cache, b"a")
        await settle()
        held.ends[0].set_exception(error)
        await settle()
        held.ends[1].set_result(None)
        with pytest.raises(type(error)):
            await leader
        assert len((await other).tokens) == 1

    run(use())


async def error_of(work: "asyncio.Task[Resolved]", param: str) -> ServiceError:
    with pytest.raises(ItemError) as raised:
        await work
    return raised.value.named(param)


def test_what_is_wrong_with_an_image_is_told_to_all_under_their_own_names_and_not_kept() -> None:
    async def use() -> None:
        cache, held = ContentCache(2**20), Held()
        leader, other = held.start(cache, b"good", b"bad"), held.start(cache, b"x", b"y", b"bad")
        await settle()
        broken = UndecodableImage("broken", param=".frames[1]", numbers={"signal": 9})
        held.ends[0].set_exception(ItemError(1, broken))
        held.ends[1].set_result(None)
        first, second = await error_of(leader, "images"), await error_of(other, "input")
        assert (first.param, second.param) == ("images[1].frames[1]", "input[2].frames[1]")
        assert first.as_dict()["error"] | {"param": ""} == second.as_dict()["error"] | {"param": ""}
        assert (await put(cache, b"bad")).num_cached == 0

    run(use())


def test_an_image_beside_a_bad_one_is_computed_by_who_waits_for_it() -> None:
    async def use() -> None:
        cache, held = ContentCache(0), Held()
        leader, other = held.start(cache, b"bad", b"good"), held.start(cache, b"good")
        await settle()
        held.ends[0].set_exception(ItemError(0, UndecodableImage("broken")))
        await settle()
        held.ends[1].set_result(None)
        assert (await error_of(leader, "images")).param == "images[0]"
        assert len((await other).tokens) == 1
        assert held.calls == [[0, 1], [0]]

    run(use())


def test_waiting_for_others_is_told() -> None:
    async def use() -> None:
        cache, held, told = ContentCache(0), Held(), []

        class Waiting:
            def __enter__(self) -> None:
                told.append("waits")

            def __exit__(self, *_: object) -> None:
                told.append("done")

        leader = held.start(cache, b"a")
        await settle()
        other = asyncio.create_task(cache.resolve([b"a"], held.compute, waiting=Waiting))
        await settle()
        assert told == ["waits"]
        held.ends[0].set_result(None)
        await asyncio.gather(leader, other)
        assert told == ["waits", "done"]

    run(use())
