"""The choice between tensor- and data-parallel, on times that follow known lines."""

import itertools
import random

import pytest

from service.modes import Line, ModeChooser
from tp import wire
from tp.modes import Mode, makespan
from tp.spec import PUBLISHED_K3

COST = PUBLISHED_K3.cost


def truth(mode: Mode, costs: list[float]) -> float:
    """Collectives cost tp 80 ms a batch; dp is a little dearer per patch, as its ranks share a cache."""
    return 0.1 + 1.5e-3 * sum(costs) if mode == "tp" else 0.02 + 2.8e-3 * makespan(costs, 2)


def learnt(noise: float = 0.0) -> ModeChooser:
    chooser = ModeChooser(PUBLISHED_K3, 2)
    modes: tuple[Mode, ...] = ("tp", "dp")
    rng = random.Random(1)
    chooser.learn(
        wire.Timing(mode=mode, num_patches=n, seconds=truth(mode, [COST(n)]) * (1 + noise * rng.uniform(-1, 1)))
        for mode, n in itertools.product(modes, (64, 256))
    )
    return chooser


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
