"""What batches of a tier took: a window of the latest, filed by the smallest tier that holds them."""

import pytest

from service.tier_times import WINDOW, BatchTime, Measured, TierTimes


def test_a_tier_is_not_measured_before_its_first_batch() -> None:
    times = TierTimes([64, 256])
    times.note(BatchTime(65, 1, 0.5))
    assert times.measured(64) is None
    assert times.measured(256) == Measured(samples=1, mean_patches=65, ms=500, images_per_s=2)


@pytest.mark.parametrize(("patches", "tier"), [(4, 64), (64, 64), (68, 256), (256, 256)])
def test_a_batch_belongs_to_the_smallest_tier_that_holds_it(patches: int, tier: int) -> None:
    times = TierTimes([64, 256])
    times.note(BatchTime(patches, 1, 1.0))
    assert [found for found in (64, 256) if times.measured(found) is not None] == [tier]


def test_images_of_all_batches_count_over_all_their_time() -> None:
    times = TierTimes([64])
    times.note(BatchTime(16, 1, 0.1))
    times.note(BatchTime(64, 5, 0.3))
    measured = times.measured(64)
    assert measured is not None
    assert (measured.samples, measured.mean_patches) == (2, 40)
    assert measured.ms == pytest.approx(200)
    assert measured.images_per_s == pytest.approx(15)


def test_only_the_latest_batches_count() -> None:
    times = TierTimes([64])
    for _ in range(WINDOW):
        times.note(BatchTime(64, 1, 100.0))
    for _ in range(WINDOW):
        times.note(BatchTime(64, 1, 0.5))
    measured = times.measured(64)
    assert measured is not None
    assert (measured.samples, measured.ms) == (WINDOW, pytest.approx(500))


def test_under_other_tiers_the_same_batches_are_filed_anew() -> None:
    times = TierTimes([64, 256])
    for patches in (16, 64, 200):
        times.note(BatchTime(patches, 1, 1.0))
    finer = times.under([16, 128])
    assert [getattr(finer.measured(tier), "samples", 0) for tier in (16, 128)] == [1, 1]  # 200 is over the top now
    assert times.under([256]).measured(256) == Measured(3, pytest.approx(280 / 3), 1000, 1)
