"""An answer's tokens, lent out of the slab: what is taken is right, and rows are free in time, whoever takes it."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
from numpy.typing import NDArray
from running import until

from service import loan as module
from service.admission import RowAllocator, Rows
from service.loan import Loan

NUM_PATCHES = 16
TOKENS = np.arange(4 * 100, dtype=np.uint32).view(np.uint8).reshape(4, 400)
Use = Callable[[Loan, RowAllocator, NDArray[np.uint8]], Awaitable[None]]


def lend(use: Use) -> None:
    """Lend the tokens to `use`, and nobody else holds their rows; they are free in the end."""

    async def main() -> None:
        allocator = RowAllocator(NUM_PATCHES)
        (run,) = allocator.allocate([NUM_PATCHES]) or []
        rows, slab = Rows(run, allocator), TOKENS.copy()
        loan = Loan(slab, rows)
        rows.release()  # the request's own hold
        await use(loan, allocator, slab)
        await until(lambda: allocator.num_free == NUM_PATCHES)

    asyncio.run(main())


@contextmanager
def busy_threads() -> Iterator[threading.Event]:
    """In the block, until the event is set, the loop's only thread is not free."""
    goes_on = threading.Event()
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    loop.run_in_executor(None, goes_on.wait, 20)
    try:
        yield goes_on
    finally:
        goes_on.set()


def taken(loan: Loan) -> bytes:
    return b"".join(iter(loan.take, b""))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE_BYTES", 300)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOAN_S", 0.0)


def test_rows_are_free_with_the_last_piece_and_pieces_stay_as_they_are() -> None:
    async def use(loan: Loan, allocator: RowAllocator, slab: NDArray[np.uint8]) -> None:
        pieces = []
        while len(pieces) < 6:
            assert allocator.num_free == 0
            pieces.append(loan.take())
        assert allocator.num_free == NUM_PATCHES
        slab[:] = 255  # as another request does
        assert [len(piece) for piece in pieces] == [300] * 5 + [100]
        assert b"".join(pieces) == TOKENS.tobytes()
        assert taken(loan) == b"" and len(loan) == TOKENS.nbytes

    lend(use)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("num_before", [0, 2])
def test_who_takes_slowly_holds_no_rows_and_gets_the_same(num_before: int) -> None:
    async def use(loan: Loan, allocator: RowAllocator, slab: NDArray[np.uint8]) -> None:
        before = [loan.take() for _ in range(num_before)]
        await until(lambda: allocator.num_free == NUM_PATCHES)
        slab[:] = 255
        assert b"".join(before) + taken(loan) == TOKENS.tobytes()

    lend(use)


@pytest.mark.usefixtures("short")
def test_what_is_taken_while_the_rest_is_copied_out_is_not_sent_twice() -> None:
    async def use(loan: Loan, allocator: RowAllocator, slab: NDArray[np.uint8]) -> None:
        with busy_threads() as goes_on:
            await until(lambda: loan._copying is not None)
            pieces = [loan.take(), loan.take()]
            assert allocator.num_free == 0
            goes_on.set()
            await until(lambda: allocator.num_free == NUM_PATCHES)
        slab[:] = 255
        assert b"".join(pieces) + taken(loan) == TOKENS.tobytes()

    lend(use)


@pytest.mark.usefixtures("short")
def test_rows_are_held_while_they_are_copied_out_though_nobody_wants_the_copy() -> None:
    async def use(loan: Loan, allocator: RowAllocator, slab: NDArray[np.uint8]) -> None:
        with busy_threads() as goes_on:
            await until(lambda: loan._copying is not None)
            loan.release()
            assert allocator.num_free == 0
            goes_on.set()
            await until(lambda: allocator.num_free == NUM_PATCHES)
        assert taken(loan) == b""

    lend(use)


@pytest.mark.usefixtures("short")
def test_without_memory_for_a_copy_it_goes_on_from_the_slab() -> None:
    class Slab(np.ndarray[tuple[int, ...], np.dtype[np.uint8]]):
        def copy(self, order: object = "C") -> "Slab":
            raise MemoryError

    async def use(loan: Loan, allocator: RowAllocator, slab: NDArray[np.uint8]) -> None:
        told: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["exception"]))
        loan._rest = loan._rest.view(Slab)
        await until(lambda: bool(told))
        assert isinstance(told[0], MemoryError) and allocator.num_free == 0
        loan._rest = loan._rest.view(np.ndarray)
        assert taken(loan) == TOKENS.tobytes()

    lend(use)


def test_a_loan_may_be_given_back_at_any_time_and_twice() -> None:
    async def use(loan: Loan, allocator: RowAllocator, slab: NDArray[np.uint8]) -> None:
        loan.take()
        loan.release()
        assert allocator.num_free == NUM_PATCHES
        loan.release()
        assert loan._timer.cancelled()

    lend(use)


def test_a_piece_is_written_over_only_when_nobody_has_it() -> None:
    async def use(loan: Loan, allocator: RowAllocator, slab: NDArray[np.uint8]) -> None:
        places, kept = set(), []
        for number in range(6):
            piece = loan.take()
            places.add(np.frombuffer(piece, np.uint8).ctypes.data)
            if number == 1:
                kept.append(memoryview(piece)[100:200])  # as a transport keeps the rest of one
        assert len(places) == 3  # the one that is kept, the one before it in hand, and the new one
        assert kept[0] == TOKENS.tobytes()[400:500]

    lend(use)
