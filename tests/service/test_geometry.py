"""The model's own rule, what a capacity makes of it, and the extremes of both. Worked sizes: model_facts section 7."""

import math
import time
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.bounds import largest_chunk, largest_patch_count, largest_picture, largest_square
from service.errors import ImageTooLarge, InvalidRequest, TooManyPatches
from service.geometry import Fit, Policy, check_image_patches, effective_policy, extent, fit, frame_rule, plan_image
from tp.spec import PUBLISHED_K3, ROPE_SIDE, Grid, ProcessorSpec


def _rule(patch_limit: int, side_limit: int = 512, *, rule: str = "navit") -> ProcessorSpec:
    half = (0.5, 0.5, 0.5)
    return ProcessorSpec(rule, 14, patch_limit, side_limit, half, half, None, "after_resize")  # type: ignore[arg-type]


K3, K25, KIMI_VL = _rule(65536), _rule(16384), _rule(4096, rule="kimi_vl")

relaxed = settings(deadline=None)  # the machine may be busy
sides = st.integers(1, 60_000)
tiers = st.integers(1, 5000).map(lambda tokens: 4 * tokens)
rules = st.sampled_from([K3, K25, _rule(256, 40), _rule(4096, 1 << 20, rule="kimi_vl")])


# ---- the model's own rule

# width, height; K3: new width, height, grid h, w; K2.5: the same
WORKED = [
    (1, 1, (1, 1, 2, 2), (1, 1, 2, 2)),
    (27, 29, (27, 29, 4, 2), (27, 29, 4, 2)),
    (28, 28, (28, 28, 2, 2), (28, 28, 2, 2)),
    (29, 28, (29, 28, 2, 4), (29, 28, 2, 4)),
    (14, 14, (14, 14, 2, 2), (14, 14, 2, 2)),
    (13, 5000, (13, 5000, 358, 2), (13, 5000, 358, 2)),
    (5000, 13, (5000, 13, 2, 358), (5000, 13, 2, 358)),
    (1, 7168, (1, 7168, 512, 2), (1, 7168, 512, 2)),
    (1, 7169, (1, 7168, 512, 2), (1, 7168, 512, 2)),
    (8000, 2, (7168, 1, 2, 512), (7168, 1, 2, 512)),
    (7168, 7168, (3584, 3584, 256, 256), (1792, 1792, 128, 128)),
    (7169, 28, (7168, 27, 2, 512), (7168, 27, 2, 512)),
    (7169, 14, (7168, 13, 2, 512), (7168, 13, 2, 512)),
    (8000, 6000, (4142, 3107, 222, 296), (2071, 1553, 112, 148)),
    (4000, 3000, (4000, 3000, 216, 286), (2073, 1554, 112, 150)),
    (3584, 3584, (3584, 3584, 256, 256), (1792, 1792, 128, 128)),
    (3585, 3584, (3585, 3584, 256, 258), (1792, 1792, 128, 128)),
    (3600, 3600, (3585, 3585, 258, 258), (1792, 1792, 128, 128)),
    (1920, 1080, (1920, 1080, 78, 138), (1920, 1080, 78, 138)),
    (1280, 720, (1280, 720, 52, 92), (1280, 720, 52, 92)),
    (900, 700, (900, 700, 50, 66), (900, 700, 50, 66)),
    (640, 480, (640, 480, 36, 46), (640, 480, 36, 46)),
    (224, 224, (224, 224, 16, 16), (224, 224, 16, 16)),
    (303, 181, (303, 181, 14, 22), (303, 181, 14, 22)),
    (100, 14336, (50, 7168, 512, 4), (50, 7168, 512, 4)),
    (20000, 500, (7168, 179, 14, 512), (7168, 179, 14, 512)),
    (12000, 9000, (4141, 3106, 222, 296), (2070, 1553, 112, 148)),
    (333, 517, (333, 517, 38, 24), (333, 517, 38, 24)),
]


@pytest.mark.parametrize(("width", "height", "k3", "k25"), WORKED)
def test_worked_sizes(width: int, height: int, k3: tuple[int, ...], k25: tuple[int, ...]) -> None:
    for rule, expected in ((K3, k3), (K25, k25)):
        result = fit(width, height, rule)
        assert (*result.size, result.grid.h, result.grid.w) == expected
        assert result.patches == expected[2] * expected[3]
        assert (result.padded_width, result.padded_height) == (14 * expected[3], 14 * expected[2])


def test_the_budget_is_checked_before_padding() -> None:
    assert fit(3600, 3600, K3).patches == 66_564 > K3.patch_limit


@relaxed
@given(sides, sides, rules)
def test_fit_never_enlarges_and_never_empties(width: int, height: int, rule: ProcessorSpec) -> None:
    result = fit(width, height, rule)
    assert 1 <= result.width <= width
    assert 1 <= result.height <= height
    assert result.grid.h % 2 == result.grid.w % 2 == 0


def test_kimi_vl_scales_by_area_alone() -> None:
    assert fit(1210, 1004, KIMI_VL).size == (991, 822)  # 86 x 71 whole patches, scale 0.819
    assert fit(13, 7000, KIMI_VL).grid == Grid(1, 500, 2)


@pytest.mark.parametrize(("width", "height"), [(7141, 28), (1, 7141), (100_000, 1)])
def test_kimi_vl_refuses_a_side_of_512_patches(width: int, height: int) -> None:
    assert fit(7140, 28, KIMI_VL).grid.w == 510
    with pytest.raises(ImageTooLarge, match="fewer than 512") as caught:
        fit(width, height, KIMI_VL)
    assert caught.value.numbers["limit"] == 511


# ---- what a capacity makes of it


def _slow_extent(width: int, height: int, rule: ProcessorSpec, max_patches: int) -> tuple[int, int]:
    """By its definition: count at every scale where a side steps up, and take the sides just below the first excess."""
    own = fit(width, height, rule)
    steps = {Fraction(n, width) for n in range(1, own.width + 1)} | {
        Fraction(n, height) for n in range(1, own.height + 1)
    }
    best = (1, 1)
    for scale in sorted(steps):
        size = max(1, math.floor(width * scale)), max(1, math.floor(height * scale))
        if Fit(*size, 14).patches > max_patches:
            return best
        best = size
    raise AssertionError("the model's own size is over the cap")


@relaxed
@given(st.integers(1, 400), st.integers(1, 400), st.sampled_from([4, 8, 12, 20, 48, 100, 256]), rules)
def test_extent_is_what_enumeration_finds(width: int, height: int, max_patches: int, rule: ProcessorSpec) -> None:
    own = fit(width, height, rule)
    result = extent(width, height, rule, max_patches)
    if own.patches <= max_patches:
        assert result == own
    else:
        assert result.size == _slow_extent(width, height, rule, max_patches)


@relaxed
@given(sides, sides, tiers, rules)
def test_extent_is_within_the_cap_and_within_a_pixel_of_one_scale(
    width: int, height: int, max_patches: int, rule: ProcessorSpec
) -> None:
    own = fit(width, height, rule)
    result = extent(width, height, rule, max_patches)
    assert result.patches <= max_patches
    if own.patches <= max_patches:
        assert result == own
        return
    assert result.width <= own.width
    assert result.height <= own.height
    # Some scale s has floor(width s) and floor(height s), at least 1, as its sides: the ranges of s overlap.
    lowest = max(Fraction(side, full) for side, full in zip(result.size, (width, height), strict=True) if side > 1)
    highest = min(Fraction(side + 1, full) for side, full in zip(result.size, (width, height), strict=True))
    assert lowest < highest


@relaxed
@given(sides, sides, rules)
def test_extent_grows_with_the_cap(width: int, height: int, rule: ProcessorSpec) -> None:
    results = [extent(width, height, rule, cap) for cap in (4, 8, 16, 64, 256, 1024, 4096, 16384, 65536, 70000)]
    for smaller, larger in pairwise(results):
        assert smaller.width <= larger.width
        assert smaller.height <= larger.height


@relaxed
@given(sides, sides, rules)
def test_extent_ends_at_one_token(width: int, height: int, rule: ProcessorSpec) -> None:
    result = extent(width, height, rule, 4)
    assert (result.padded_width, result.padded_height) == (28, 28)
    assert max(result.size) == min(28, max(width, height))


def test_extent_is_fast_for_enormous_sides() -> None:
    started = time.perf_counter()
    for width, height in ((10**6, 10**6), (10**6, 1), (999_983, 999_979), (10**9, 3)):
        assert extent(width, height, K3, 4096).patches <= 4096
    assert time.perf_counter() - started < 0.1


@pytest.mark.parametrize(("patches", "tier"), [(4, 256), (256, 256), (260, 1024), (4096, 4096)])
def test_the_tier_is_the_smallest_that_holds_the_image(patches: int, tier: int) -> None:
    assert check_image_patches(patches, (256, 1024, 4096)) == tier


def test_over_the_top_tier_is_refused_with_the_numbers() -> None:
    with pytest.raises(TooManyPatches, match="4100 patches, the limit is 4096") as caught:
        check_image_patches(4100, (256, 1024, 4096))
    assert caught.value.numbers == {"patches": 4100, "limit": 4096}


def test_refuse_names_the_size_that_downscale_gives() -> None:
    with pytest.raises(TooManyPatches) as caught:
        plan_image(4000, 3000, K3, (1024, 16384), "refuse")
    plan = plan_image(4000, 3000, K3, (1024, 16384), "downscale")
    assert caught.value.numbers == {"patches": 61776, "limit": 16384, "downscaled_size": list(plan.encoded_size)}
    assert "{} x {}".format(*plan.encoded_size) in caught.value.message


def test_a_plan_reports_everything() -> None:
    plan = plan_image(303, 181, K3, (256, 1024, 4096), "refuse")
    assert plan.original_size == plan.encoded_size == (303, 181)
    assert (plan.padded_size, plan.grid, plan.patches) == ((308, 196), Grid(1, 14, 22), 308)
    assert (plan.tier, plan.downscaled) == (1024, False)


def test_a_plan_tells_its_scale_and_its_padding() -> None:
    plan = plan_image(64, 48, K3, (1024,), "refuse")  # padded to 84 x 56
    assert (plan.scale, plan.pixels, plan.padding_pixels) == (1, 84 * 56, 84 * 56 - 64 * 48)
    plan = plan_image(1806, 448, K3, (4096,), "downscale")  # 65 x 16 tokens become 64 x 16
    assert (plan.own_size, plan.encoded_size) == ((1806, 448), (1792, 444))
    assert plan.scale == pytest.approx(1792 / 1806)
    assert plan.padding_pixels == 4 * 1792
    chunk = plan_image(64, 48, K3, (1024,), "refuse", num_frames=3)
    assert (chunk.pixels, chunk.padding_pixels) == (3 * 84 * 56, 3 * (84 * 56 - 64 * 48))


def test_the_models_own_resize_is_not_called_downscaled() -> None:
    plan = plan_image(8000, 6000, K25, (4096, 16384, 20000), "downscale")
    assert plan.encoded_size == (2071, 1553)
    assert not plan.downscaled
    assert plan_image(8000, 6000, K25, (4096, 16384), "downscale").downscaled


# ---- video chunks

K25_VIDEO = replace(K25, frame_patch_limit=4096)


def test_a_chunk_counts_all_its_frames() -> None:
    plan = plan_image(303, 181, K25_VIDEO, (256, 1024, 4096), "refuse", num_frames=3)
    assert (plan.grid, plan.patches, plan.tier) == (Grid(3, 14, 22), 924, 1024)
    assert plan.grid.num_tokens == 77
    assert (plan.original_size, plan.padded_size, plan.downscaled) == ((303, 181), (308, 196), False)


def test_frames_have_the_images_rule_with_a_limit_of_their_own() -> None:
    frame = plan_image(1920, 1080, K25_VIDEO, (65536,), "refuse", num_frames=4)
    assert frame.encoded_size == fit(1920, 1080, replace(K25, patch_limit=4096)).size == (1196, 672)
    assert frame.patches == 4 * 48 * 86
    assert not frame.downscaled
    assert plan_image(1920, 1080, K25_VIDEO, (65536,), "refuse").encoded_size == (1920, 1080)
    assert plan_image(1920, 1080, K25, (65536,), "refuse", num_frames=1).encoded_size == (1920, 1080)


def test_the_limit_of_a_whole_video_is_shared_by_its_frames() -> None:
    rule = replace(K25_VIDEO, chunk_patch_limit=4098)
    assert frame_rule(rule, 1).patch_limit == 4096
    assert [frame_rule(rule, frames).patch_limit for frames in (2, 3, 4)] == [2049, 1366, 1024]  # 1024.5 to even


def test_a_chunk_over_the_tier_is_refused_with_the_size_that_downscale_gives() -> None:
    with pytest.raises(TooManyPatches) as caught:
        plan_image(896, 896, K25_VIDEO, (1024, 8192), "refuse", num_frames=4)
    plan = plan_image(896, 896, K25_VIDEO, (1024, 8192), "downscale", num_frames=4)
    assert caught.value.numbers == {"patches": 16384, "limit": 8192, "downscaled_size": list(plan.encoded_size)}
    assert caught.value.message == (
        "the frames of the chunk together have 16384 patches, the limit is 8192; 616 x 616 pixels each would fit"
    )
    assert plan.encoded_size == extent(896, 896, K25_VIDEO, 2048).size
    assert (plan.tier, plan.downscaled) == (8192, True)
    assert plan.patches <= 8192


@pytest.mark.parametrize("policy", ["refuse", "downscale"])
def test_a_tier_too_small_for_one_token_a_frame_has_no_size_to_offer(policy: Policy) -> None:
    with pytest.raises(TooManyPatches) as caught:
        plan_image(28, 28, K25_VIDEO, (8,), policy, num_frames=4)
    assert caught.value.numbers == {"patches": 16, "limit": 8}
    assert "the frames of the chunk together have 16 patches" in caught.value.message


@pytest.mark.parametrize("patch_size", [4, 32])
@pytest.mark.parametrize("patch_limit", [4, 2**31 - 1])
@pytest.mark.parametrize("side_limit", [4, ROPE_SIDE])
@pytest.mark.parametrize("rule", [K3, KIMI_VL])
def test_every_rule_that_a_checkpoint_may_have_has_a_largest_count(
    rule: ProcessorSpec, patch_size: int, patch_limit: int, side_limit: int
) -> None:
    """The bounds of `tp.spec`: nothing within them takes long or overflows."""
    rule = replace(rule, patch_size=patch_size, patch_limit=patch_limit, side_limit=side_limit)
    patches, width, height = largest_patch_count(rule)
    assert fit(width, height, rule).patches == patches <= side_limit**2


def test_the_largest_chunk_is_over_the_largest_image() -> None:
    assert largest_chunk(PUBLISHED_K3) == 4 * 17_856 > largest_patch_count(PUBLISHED_K3.processor)[0]
    assert largest_chunk(replace(PUBLISHED_K3, pos_emb_time=1)) is None


@relaxed
@given(sides, sides, st.integers(1, 4), tiers)
def test_every_chunk_has_a_plan(width: int, height: int, num_frames: int, top: int) -> None:
    plan = plan_image(width, height, K25_VIDEO, (max(16, top),), "downscale", num_frames=num_frames)
    assert plan.patches == num_frames * plan.grid.h * plan.grid.w <= plan.tier
    assert 1 <= plan.encoded_size[0] <= width


# ---- every picture


@relaxed
@given(sides, sides, st.lists(tiers, min_size=1, max_size=4, unique=True).map(sorted), rules)
def test_every_picture_has_a_plan(width: int, height: int, capacities: list[int], rule: ProcessorSpec) -> None:
    plan = plan_image(width, height, rule, capacities, "downscale")
    assert plan.patches <= plan.tier
    assert plan.tier in capacities
    assert plan.downscaled == (fit(width, height, rule).patches > capacities[-1])


@pytest.mark.parametrize(
    ("configured", "allowed", "requested", "expected"),
    [
        ("refuse", "none", None, "refuse"),
        ("refuse", "none", "refuse", "refuse"),
        ("refuse", "none", "downscale", None),
        ("refuse", "stricter", "downscale", None),
        ("refuse", "any", "downscale", "downscale"),
        ("downscale", "none", None, "downscale"),
        ("downscale", "none", "downscale", "downscale"),
        ("downscale", "none", "refuse", None),
        ("downscale", "stricter", "refuse", "refuse"),
        ("downscale", "any", "refuse", "refuse"),
    ],
)
def test_a_request_may_name_a_policy_where_allowed(configured, allowed, requested, expected) -> None:  # type: ignore[no-untyped-def]
    if expected is None:
        with pytest.raises(InvalidRequest) as caught:
            effective_policy(configured, allowed, requested)
        assert caught.value.param == "oversize"
    else:
        assert effective_policy(configured, allowed, requested) == expected


# ---- the extremes


@pytest.mark.parametrize(
    ("rule", "expected"), [(K3, (67_320, 1889, 7377)), (K25, (17_856, 489, 7081)), (KIMI_VL, (5352, 153, 6731))]
)
def test_largest_patch_count_of_the_published_rules(rule: ProcessorSpec, expected: tuple[int, int, int]) -> None:
    started = time.perf_counter()
    assert largest_patch_count.__wrapped__(rule) == expected
    assert time.perf_counter() - started < 0.5
    assert fit(*expected[1:], rule).patches == expected[0]


def _brute_force(rule: ProcessorSpec, longest: int) -> tuple[int, int, int]:
    """By `fit`'s steps on every portrait up to `longest` pixels, in numpy."""
    width, height = np.meshgrid(np.arange(1, longest + 1), np.arange(1, longest + 1), indexing="ij")
    most = 14 * rule.side_limit
    if rule.rule == "navit":
        area = np.maximum(1, width // 14) * np.maximum(1, height // 14)
        scale = np.minimum(np.sqrt(rule.patch_limit / area), np.minimum(most / width, most / height))
    else:
        scale = np.sqrt(rule.patch_limit / np.maximum(1, (width // 14) * (height // 14)))
    scale = np.minimum(1.0, scale)
    rows, columns = (np.ceil(np.maximum(1, np.floor(side * scale)) / 28) for side in (height, width))
    counts = np.where(width <= height, 4 * rows * columns, 0)
    if rule.rule == "kimi_vl":
        counts[2 * np.maximum(rows, columns) >= rule.side_limit] = 0
    index = int(counts.argmax())
    return int(counts.flat[index]), index // longest + 1, index % longest + 1


# Limits at which the widest result lies inside the searched square: side limits of up to 21 patches are 294 pixels.
CASES = [(256, 20), (100, 20), (60, 21), (441, 21), (90, 12), (37, 9), (16, 5), (200, 17), (7, 4), (1000, 20)]


@pytest.mark.parametrize("rule", ["navit", "kimi_vl"])
@pytest.mark.parametrize(("patch_limit", "side_limit"), CASES)
def test_largest_patch_count_is_what_brute_force_finds(patch_limit: int, side_limit: int, rule: str) -> None:
    processor = _rule(patch_limit, side_limit, rule=rule)
    assert largest_patch_count(processor) == _brute_force(processor, 700)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["navit", "kimi_vl"])
@pytest.mark.parametrize(
    ("patch_limit", "side_limit"), [(256, 40), (700, 40), (1444, 40), (1600, 41), (333, 40), (120, 33)]
)
def test_largest_patch_count_is_what_exhaustive_search_finds(patch_limit: int, side_limit: int, rule: str) -> None:
    processor = _rule(patch_limit, side_limit, rule=rule)
    assert largest_patch_count(processor) == _brute_force(processor, 3000)


def test_largest_square() -> None:
    assert [largest_square(cap, K3) for cap in (4, 1024, 4096, 16384, 65536)] == [28, 448, 896, 1792, 3584]
    assert largest_square(65536, K25) == 1805  # from there on the model's own rule shrinks it


@pytest.mark.parametrize("aspect", [(1, 1), (4, 3), (16, 9), (9, 16), (100, 1)])
@pytest.mark.parametrize("rule", [K3, K25, KIMI_VL])
def test_the_largest_picture_is_untouched_and_the_next_is_not(rule: ProcessorSpec, aspect: tuple[int, int]) -> None:
    width, height = largest_picture(4096, rule, aspect=aspect)
    assert fit(width, height, rule).size == (width, height)
    assert fit(width, height, rule).patches <= 4096
    wider = width + 1, (width + 1) * aspect[1] // aspect[0]
    try:
        assert fit(*wider, rule).size != wider or fit(*wider, rule).patches > 4096
    except ImageTooLarge:
        assert rule is KIMI_VL
