"""The content cache: merged tokens by what they were made of, and one computation for all who want the same at once.

It keeps a bounded number of bytes and drops what was used least recently. It knows keys and tokens, no requests:
`service.engine` asks it, on the event loop, and computes what nobody has.
"""

import asyncio
import copy
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from service.content_keys import Key
from service.errors import NotReady, ServiceError
from service.geometry import ImagePlan
from service.waiting import first_of

OVERHEAD_BYTES = 2048  # of an entry beside its tokens: 1.3 KB of Python's objects were measured, and malloc's rounding


@dataclass(frozen=True, slots=True)
class ItemTokens:
    """An image or video chunk, encoded: uint8 [num_tokens, bytes of a token], in the compute dtype."""

    plan: ImagePlan
    values: NDArray[np.uint8]

    def copy(self) -> "ItemTokens":
        """The same in memory of its own, which nobody may write to."""
        values = self.values.copy()
        values.flags.writeable = False
        return ItemTokens(self.plan, values)

    @property
    def num_bytes(self) -> int:
        """What keeping it takes."""
        return self.values.nbytes + OVERHEAD_BYTES


class ItemError(Exception):
    """One of several images cannot be answered: its index, and an error whose `param` says at most which frame."""

    def __init__(self, index: int, error: ServiceError) -> None:
        super().__init__(error.message)
        self.index = index
        self.error = error

    def named(self, param: str) -> ServiceError:
        """The error with the image's full name; others may hold the same one, so it is a copy."""
        error = copy.copy(self.error)
        error.param = f"{param}[{self.index}]{error.param or ''}"
        return error


@dataclass(frozen=True, slots=True)
class Resolved:
    """The tokens of each key, and how many of them were not computed for it."""

    tokens: Sequence[ItemTokens]
    num_cached: int
    num_coalesced: int


@dataclass(eq=False, slots=True)
class _Flight:
    """A computation under way. Once it is done without an outcome, whoever still wants one computes."""

    done: asyncio.Event = field(default_factory=asyncio.Event)
    outcome: ItemTokens | ServiceError | None = None

    def result(self, index: int) -> ItemTokens:
        """The outcome that there is, for the one who wants it as its item of that index. Raises ItemError."""
        if isinstance(self.outcome, ServiceError):
            raise ItemError(index, self.outcome)
        assert self.outcome is not None
        return self.outcome


# Called with indexes of keys; gives their tokens in that order. Raises ItemError with a position among those indexes.
Compute = Callable[[Sequence[int]], Awaitable[Sequence[ItemTokens]]]


class ContentCache:
    """Tokens by key, at most `max_bytes` of them. 0: nothing is kept."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_hits = 0
        self.num_misses = 0  # that were computed, or begun
        self.num_coalesced = 0
        self.num_evictions = 0
        self._entries: OrderedDict[Key, ItemTokens] = OrderedDict()  # least recently used first
        self._flights: dict[Key, _Flight] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def resize(self, max_bytes: int) -> None:
        """Keep at most so many bytes from now on."""
        self.max_bytes = max_bytes
        self._evict()

    async def resolve(
        self,
        keys: Sequence[Key],
        compute: Compute,
        *,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Resolved:
        """The tokens of each key: kept, or of somebody who computes them now, or by `compute`, all others at once.

        `waiting` is entered while there is nothing to do but to wait for others. Where they end without a result (their
        client left, their deadline passed), it is computed here. Raises ItemError, also with what others found to be
        wrong with the image itself, and whatever else `compute` raises.
        """
        found: dict[int, ItemTokens] = {}
        cached: set[int] = set()
        coalesced: set[int] = set()
        while len(found) < len(keys):
            kept, led, followed = self._claim({index: key for index, key in enumerate(keys) if index not in found})
            found |= kept
            cached |= kept.keys()
            if led:
                found |= zip(led, await self._lead(led, compute), strict=True)
            elif followed:
                with waiting():
                    await first_of(*(flight.done.wait() for flight in set(followed.values())))
            for index, flight in followed.items():
                if flight.outcome is not None:
                    self.num_coalesced += 1
                    coalesced.add(index)
                    found[index] = flight.result(index)
        return Resolved([found[index] for index in range(len(keys))], len(cached), len(coalesced))

    def _claim(self, wanted: Mapping[int, Key]) -> tuple[dict[int, ItemTokens], dict[int, Key], dict[int, _Flight]]:
        """What of it is kept, what is nobody's and so the caller's to compute, and what somebody computes now."""
        kept: dict[int, ItemTokens] = {}
        led: dict[int, Key] = {}
        followed: dict[int, _Flight] = {}
        for index, key in wanted.items():
            if key in self._entries:
                self._entries.move_to_end(key)
                kept[index] = self._entries[key]
            elif key in self._flights:
                followed[index] = self._flights[key]
            else:
                self._flights[key] = _Flight()
                led[index] = key
        self.num_hits += len(kept)
        self.num_misses += len(led)
        return kept, led, followed

    async def _lead(self, led: Mapping[int, Key], compute: Compute) -> Sequence[ItemTokens]:
        """Compute these, and tell those who wait what came of it."""
        indexes = list(led)
        try:
            computed = await compute(indexes)
            for key, tokens in zip(led.values(), computed, strict=True):
                self._flights[key].outcome = tokens
                self._put(key, tokens)
            return computed
        except ItemError as failed:
            index = indexes[failed.index]
            if not isinstance(failed.error, NotReady):  # that is the service's state, and may be over for the next one
                self._flights[led[index]].outcome = failed.error
            raise ItemError(index, failed.error) from None
        finally:
            for key in led.values():
                self._flights.pop(key).done.set()

    def _put(self, key: Key, tokens: ItemTokens) -> None:
        if tokens.num_bytes <= self.max_bytes:
            self._entries[key] = tokens
            self.num_bytes += tokens.num_bytes
            self._evict()

    def _evict(self) -> None:
        while self.num_bytes > self.max_bytes:
            _, dropped = self._entries.popitem(last=False)
            self.num_bytes -= dropped.num_bytes
            self.num_evictions += 1
