"""Admission: rows, bytes and queue length, granted at once or refused."""

import heapq
import itertools
from collections.abc import Callable
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.admission import Admission, HeldBytes, RowAllocator
from service.errors import Overloaded, RequestTooLarge
from tp.settings import LimitSettings


def test_all_runs_of_a_request_or_none() -> None:
    allocator = RowAllocator(16)
    assert allocator.allocate([8, 12]) is None
    assert allocator.num_free == 16
    assert [run.start for run in allocator.allocate([8, 4]) or []] == [0, 8]


def test_freed_neighbours_merge() -> None:
    allocator = RowAllocator(12)
    runs = allocator.allocate([4, 4, 4]) or []
    for index in (0, 2, 1):
        allocator.free(runs[index])
    assert allocator.allocate([12]) is not None


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 8)), max_size=60))
def test_runs_never_overlap_and_nothing_is_lost(steps: list[tuple[bool, int]]) -> None:
    allocator = RowAllocator(64)
    held = []
    for is_allocation, size in steps:
        if is_allocation:
            held += allocator.allocate([4 * size]) or []
        elif held:
            allocator.free(held.pop(size % len(held)))
        rows = [row for run in held for row in range(run.start, run.end)]
        assert len(rows) == len(set(rows))
        assert allocator.num_free == 64 - len(rows)
    for run in held:
        allocator.free(run)
    assert allocator.allocate([64]) is not None


def test_rows_are_free_when_the_last_holder_lets_go() -> None:
    admission = Admission(16, LimitSettings())
    with admission.admit([16], cost=16) as permit:
        permit.rows[0].hold()  # a batch on the workers
    assert admission.allocator.num_free == 0
    permit.rows[0].release()
    assert admission.allocator.num_free == 16


def test_rows_move_for_all_holders_and_leave_their_old_run_to_one() -> None:
    admission = Admission(32, LimitSettings())
    with admission.admit([16], cost=16) as permit:
        (rows,) = permit.rows
        rows.hold()  # a batch on the workers
        left = rows.move()
        assert left is not None
        assert (left.run.start, rows.run.start, admission.allocator.num_free) == (0, 16, 0)
        assert rows.move() is None and rows.run.start == 16
        rows.release()
    assert admission.allocator.num_free == 16
    left.release()
    assert admission.allocator.num_free == 32


def test_a_request_over_the_slab_is_not_an_overload() -> None:
    with pytest.raises(RequestTooLarge) as caught, Admission(16, LimitSettings()).admit([12, 8], cost=20):
        pass
    assert caught.value.numbers == {"patches": 20, "limit": 16}


def test_a_full_slab_is_refused_with_a_time_to_come_back() -> None:
    admission = Admission(16, LimitSettings())
    with admission.admit([16], cost=16):
        assert refusal(admission, cost=4) == 1


class Clock:
    """Seconds that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def measured(clock: Clock, num_patches: int = 64, **limits: float) -> Admission:
    """An admission that has seen 2,000 patch equivalents a second, all of the time."""
    admission = Admission(num_patches, LimitSettings(**limits), clock)
    with admission.admit([4], cost=4000):
        clock.now += 2
        admission.note_batch(cost=4000, seconds=1)
    clock.now += 1000  # what arrived is long forgotten
    return admission


def refusal(admission: Admission, cost: float) -> float:
    with pytest.raises(Overloaded) as caught, admission.admit([4], cost=cost):
        pass
    assert caught.value.retry_after_s is not None
    return caught.value.retry_after_s


def test_a_long_queue_is_refused_at_the_measured_rate() -> None:
    admission = measured(Clock(), max_queue_s=10)
    with admission.admit([4], cost=100000):
        assert admission.expected_wait_s() == 50
        assert refusal(admission, cost=4000) >= 50
    with admission.admit([4], cost=4000):  # and the queue is empty again
        assert admission.queued_cost == 4000


def test_tiny_batches_tell_nothing_about_a_large_one() -> None:
    clock = Clock()
    admission = Admission(64, LimitSettings(), clock)
    for _ in range(3):
        with admission.admit([4], cost=4):
            clock.now += 0.005
            admission.note_batch(cost=4, seconds=0.005)
    with admission.admit([4], cost=70_888), admission.admit([4], cost=4):  # 16,384 patches of K3
        assert admission.expected_wait_s() < 1


def test_those_who_are_refused_are_told_to_come_one_after_the_other() -> None:
    clock = Clock()
    admission = measured(clock, num_patches=4)
    with admission.admit([4], cost=4000):
        clock.now += 100
        waits = [refusal(admission, cost=4000) for _ in range(3)]
    assert waits == [2, 4, 6]  # each behind the 4,000 in the queue and the 4,000 of each who was refused before


def test_a_promise_is_over_when_its_time_has_come() -> None:
    clock = Clock()
    admission = measured(clock, num_patches=4)
    with admission.admit([4], cost=4000):
        clock.now += 100
        assert refusal(admission, cost=8000) == 2
        clock.now += 100
        assert refusal(admission, cost=8000) == 2


def test_while_more_arrives_than_is_done_returning_takes_longer() -> None:
    clock = Clock()
    admission = measured(clock, num_patches=4)
    with admission.admit([4], cost=4000):
        for _ in range(100):  # 4,000 a second arrive, 2,000 are done
            clock.now += 1
            refusal(admission, cost=4000)
            admission._promised.clear()
        assert refusal(admission, cost=4000) == 43  # 2 s for what is queued, and half of it; 10 s, and 30 s of the 100


def test_idle_time_does_not_slow_the_measured_rate() -> None:
    clock = Clock()
    admission = measured(clock)
    clock.now += 50
    with admission.admit([4], cost=4000):
        clock.now += 2
        admission.note_batch(cost=4000, seconds=2)
        assert admission.expected_wait_s() == pytest.approx(2)
    assert admission.expected_batch_s(4000) == pytest.approx(1.5, rel=0.1)


def test_idle_time_does_not_count_after_costs_that_do_not_sum_up_to_nothing() -> None:
    clock = Clock()
    admission = measured(clock)
    with ExitStack() as last:
        last.enter_context(admission.admit([4], cost=0.1))
        with admission.admit([4], cost=0.2), admission.admit([4], cost=0.3):
            pass
    assert admission.queued_cost == admission.expected_wait_s() == 0
    clock.now += 3600
    with admission.admit([4], cost=4000):
        clock.now += 2
        admission.note_batch(cost=4000, seconds=2)
        assert admission.expected_wait_s() == pytest.approx(2)


def test_a_warm_up_is_known_until_a_batch_is() -> None:
    clock = Clock()
    admission = Admission(64, LimitSettings(), clock)
    assert admission.expected_batch_s(4000) is None
    admission.note_warm_up(cost=1000, seconds=0.1)
    assert admission.expected_batch_s(4000) == pytest.approx(0.4)
    with admission.admit([4], cost=4000):
        clock.now += 20
        admission.note_batch(cost=4000, seconds=20)
    admission.note_warm_up(cost=1000, seconds=0.1)  # of a group that came back
    assert admission.expected_batch_s(4000) == pytest.approx(20, rel=0.1)


def test_a_tiny_batch_does_not_make_a_large_one_look_hung() -> None:
    admission = Admission(64, LimitSettings())
    admission.note_batch(cost=20, seconds=0.15)
    assert (admission.expected_batch_s(70_888) or 0) > 500


class Service:
    """An admission in front of workers that do 20 requests a second, in simulated time."""

    COST = 1024 * (1 + 1024 / 4925)  # K3's, of a picture of 1,024 patches

    def __init__(self, max_queue_s: float) -> None:
        self.clock = Clock()
        self.admission = Admission(65536, LimitSettings(max_queue_s=max_queue_s), self.clock)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._queue: list[tuple[ExitStack, Callable[[float], None]]] = []
        self._is_working = False

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.clock.now + seconds, next(self._order), action))

    def run(self) -> None:
        while self._events:
            self.clock.now, _, action = heapq.heappop(self._events)
            action()

    def send(self, on_end: Callable[[float], None]) -> None:
        """One request; `on_end` gets 0 where it was answered, else Retry-After."""
        stack = ExitStack()
        try:
            stack.enter_context(self.admission.admit([1024], cost=self.COST))
        except Overloaded as error:
            assert error.retry_after_s is not None
            on_end(error.retry_after_s)
            return
        self._queue.append((stack, on_end))
        self._work()

    def _work(self) -> None:
        if self._queue and not self._is_working:
            self._is_working = True
            batch, self._queue = self._queue[:16], self._queue[16:]
            seconds = len(batch) / 20
            self.after(seconds, lambda: self._finish(batch, seconds))

    def _finish(self, batch: list[tuple[ExitStack, Callable[[float], None]]], seconds: float) -> None:
        self._is_working = False
        self.admission.note_batch(self.COST * len(batch), seconds)
        for stack, on_end in batch:
            stack.close()
            on_end(0)
        self._work()


def returned(service: Service, *, rate: float, seconds: float) -> tuple[float, list[float]]:
    """Of clients that return when told, the share that then gets in; and what they were told."""
    told: list[float] = []
    second: list[float] = []

    def on_end(retry_after_s: float) -> None:
        if retry_after_s:
            told.append(retry_after_s)
            service.after(retry_after_s, lambda: service.send(second.append))

    for index in range(int(rate * seconds)):
        service.after(index / rate, lambda: service.send(on_end))
    service.run()
    return second.count(0) / max(1, len(second)), told


@pytest.mark.parametrize("max_queue_s", [2, 3, 60])
@pytest.mark.parametrize(("rate", "seconds"), [(40, 20), (60, 20), (120, 20), (500, 1)])
def test_who_returns_when_told_gets_in(rate: float, seconds: float, max_queue_s: float) -> None:
    service = Service(max_queue_s)
    service.admission.note_warm_up(service.COST, 1 / 20)
    share, told = returned(service, rate=rate, seconds=seconds)
    assert share > 0.93 or not told, (share, len(told))


def test_clients_that_do_not_wait_do_not_make_others_wait_for_ever() -> None:
    service = Service(max_queue_s=2)
    service.admission.note_warm_up(service.COST, 1 / 20)
    told: list[float] = []

    def on_end(retry_after_s: float) -> None:
        told.append(retry_after_s)
        if service.clock.now < 60:
            service.after(0.05, lambda: service.send(on_end))  # whatever it was told

    for _ in range(60):
        service.send(on_end)
    service.run()
    assert len(told) > 20_000
    assert max(told) < 180
    assert len(service.admission._promised) <= 180
    service.clock.now += 10
    _, told_after = returned(service, rate=500, seconds=0.24)
    assert max(told_after) < 120


def test_bytes_count_until_released() -> None:
    admission = Admission(16, LimitSettings(max_inflight_bytes=100))
    with HeldBytes(admission) as held:
        held.add(60)
        held.add_unchecked(30)
        with HeldBytes(admission) as other, pytest.raises(Overloaded):
            other.add(20)
    assert admission.bytes_in_flight == 0
