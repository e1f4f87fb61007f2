"""Admission: rows, bytes and queue length, granted at once or refused."""

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
            admission._promises.clear()
        assert refusal(admission, cost=4000) in (4, 5)  # twice the 2 s for what is queued


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


def test_bytes_count_until_released() -> None:
    admission = Admission(16, LimitSettings(max_inflight_bytes=100))
    with HeldBytes(admission) as held:
        held.add(60)
        held.add_unchecked(30)
        with HeldBytes(admission) as other, pytest.raises(Overloaded):
            other.add(20)
    assert admission.bytes_in_flight == 0
