"""The choice between tensor- and data-parallel, on times that follow known lines."""

import itertools
import random

import pytest

from service.modes import Line, ModeChooser
from tp import wire
from tp.modes import Mode, makespan, timing_sizes
from tp.spec import PUBLISHED_K3

COST = PUBLISHED_K3.cost
MODES: tuple[Mode, ...] = ("tp", "dp")
SIZES = timing_sizes(1024, 2)


def truth(mode: Mode, costs: list[float]) -> float:
    """Collectives cost tp 80 ms a batch; dp is a little dearer per patch, as its ranks share a cache."""
    return 0.1 + 1.5e-3 * sum(costs) if mode == "tp" else 0.02 + 2.8e-3 * makespan(costs, 2)


def learnt(noise: float = 0.0) -> ModeChooser:
    chooser = ModeChooser(PUBLISHED_K3, 2)
    rng = random.Random(1)
    timings = [
        timing(mode, n, truth(mode, [COST(n)] * 2) * (1 + noise * rng.uniform(-1, 1)))
        for mode, n in itertools.product(MODES, SIZES)
    ]
    chooser.learn([timings, timings])
    return chooser


def timing(mode: Mode, num_patches: int, seconds: float) -> wire.Timing:
    return wire.Timing(mode=mode, num_images=2, num_patches=num_patches, seconds=seconds)


def test_a_line_goes_through_its_points() -> None:
    line = Line()
    line.add(100, 0.3)
    line.add(1000, 1.2)
    assert line.at(100) == pytest.approx(0.3)
    assert line.at(5000) == pytest.approx(5.2)


def test_a_line_never_predicts_less_than_nothing() -> None:
    falling, from_below = Line(), Line()
    falling.add(100, 1.0)
    falling.add(1000, 0.5)
    from_below.add(100, 0.01)
    from_below.add(1000, 1.0)
    assert falling.at(1e6) == pytest.approx(falling.at(0))
    assert from_below.at(0) == 0


def test_one_large_image_is_cut_and_many_small_ones_are_shared_out() -> None:
    chooser = learnt()
    assert chooser.choose([COST(16384)]).mode == "tp"
    assert chooser.choose([COST(256)] * 16).mode == "dp"
    assert set(chooser.choose([COST(256)]).predicted_s) == {"tp", "dp"}


def test_within_5_percent_of_the_better_mode_on_a_mix_of_sizes() -> None:
    chooser, rng = learnt(noise=0.3), random.Random(2)
    chosen = best = 0.0
    for batch in range(400):
        costs = [COST(4 * rng.randint(1, 300)) for _ in range(rng.choice([1, 1, 2, 3, 8, 16]))]
        mode = chooser.choose(costs).mode
        seconds = truth(mode, costs)
        chooser.note(mode, costs, seconds * (1 + 0.05 * rng.uniform(-1, 1)))
        if batch >= 100:
            chosen += seconds
            best += min(truth("tp", costs), truth("dp", costs))
    assert chosen <= 1.05 * best


def test_what_each_further_image_takes_is_learnt_before_the_first_batch() -> None:
    """A lone image says that tp is the quicker mode; but it takes 30 ms more for each further one."""

    def seconds(mode: Mode, costs: list[float]) -> float:
        return 0.03 * len(costs) + 2e-3 * sum(costs) if mode == "tp" else 0.031 + 4e-3 * makespan(costs, 2)

    chooser = ModeChooser(PUBLISHED_K3, 2)
    chooser.learn([[timing(mode, n, seconds(mode, [COST(n)] * 2)) for mode in MODES for n in SIZES]])
    for batch in ([COST(256)] * 4, [COST(256)] * 64, [COST(64)] * 16):
        assert chooser.choose(batch).mode == min(MODES, key=lambda mode: seconds(mode, batch)) == "dp"


def test_a_batch_is_as_slow_as_its_slowest_rank() -> None:
    chooser = ModeChooser(PUBLISHED_K3, 2)
    quick = [timing("tp", n, 1.0) for n in SIZES] + [timing("dp", n, 0.9) for n in SIZES]
    slow = [timing("tp", n, 1.0) for n in SIZES] + [timing("dp", n, 1.1) for n in SIZES]
    chooser.learn([quick, slow])
    choice = chooser.choose([COST(256)] * 2)
    assert choice.mode == "tp"
    assert choice.predicted_s["dp"] == pytest.approx(1.1)


@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("smallest_tier", [256, 1024, 4096])
def test_what_is_timed_fits_the_smallest_tier(smallest_tier: int, world_size: int) -> None:
    small, large = timing_sizes(smallest_tier, world_size)
    assert 0 < small < large
    assert large * world_size <= smallest_tier
    assert small % 4 == large % 4 == 0


def test_old_times_fade() -> None:
    chooser = learnt()
    for _ in range(300):
        chooser.note("dp", [COST(256)] * 16, 60.0)
    assert chooser.choose([COST(256)] * 16).mode == "tp"


def test_no_choice_where_ranks_hold_shards() -> None:
    chooser = ModeChooser(PUBLISHED_K3, 2)
    chooser.learn([])
    chooser.note("tp", [5.0], 1.0)
    choice = chooser.choose([COST(256)] * 16)
    assert (choice.mode, choice.predicted_s) == ("tp", {})
