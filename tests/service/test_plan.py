import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from service.geometry import fit
from service.plan import CapacityPlan, plan_capacity, reference_bytes, render
from tp.memory import total_bytes
from tp.settings import load_settings
from tp.slab import SlabLayout
from tp.spec import PUBLISHED_K3, SpecError


def plan(**flags: object) -> CapacityPlan:
    settings = load_settings(flags={name.replace("__", "."): value for name, value in flags.items()}).settings
    return plan_capacity(PUBLISHED_K3, settings)


def two_tiers(**flags: object) -> CapacityPlan:
    return plan(capacity__patch_capacities="16384,65536", **flags)


def text(of: CapacityPlan) -> str:
    console = Console(file=io.StringIO(), width=120, color_system=None)
    console.print(render(of))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_dropping_the_top_tier_frees_the_reference_layouts_worked_numbers() -> None:
    drop = two_tiers().dropping_top
    assert drop is not None
    assert drop.reference.pixels_bytes == 115_605_504
    assert drop.reference.slab_bytes == 100_663_296
    assert drop.reference.indices_bytes == 3_342_336
    assert drop.reference.total_bytes == 320_274_432


def test_two_byte_pixels_would_save_in_the_reference_layout() -> None:
    assert reference_bytes(PUBLISHED_K3, 16_384).half_pixels_save_bytes == 19_267_584


def test_worked_numbers_stand_in_the_text_and_in_the_json() -> None:
    shown = text(two_tiers())
    for number in ("115,605,504", "100,663,296", "3,342,336", "320,274,432", "19,267,584"):
        assert number in shown
    freed = two_tiers().as_dict()["dropping_top_tier_frees"]
    assert freed["reference"]["total_bytes"] == 320_274_432


def test_scratch_is_that_of_the_device_that_is_named() -> None:
    on_gpu, names = plan(parallel__device="cuda"), [row.name for row in plan(parallel__device="cuda").scratch]
    assert "tokens of the batch before" in names
    assert "scratch of the CUDA forward" in text(on_gpu)
    for device in ("auto", "cpu"):
        assert "tokens of the batch before" not in [row.name for row in plan(parallel__device=device).scratch]
        assert "scratch of the CPU forward" in text(plan(parallel__device=device))


def test_weights_of_one_rank_are_the_published_bytes() -> None:
    assert plan().weights_bytes == 894_717_952


def test_two_ranks_share_the_blocks_and_repeat_the_rest() -> None:
    blocks = 27 * 2 * (4608 * 1024 + 1024 * 1536 + 2 * 4096 * 1024)
    assert plan(parallel__tensor=2).weights_bytes == 894_717_952 - blocks // 2


def test_uneven_shards_are_planned_for_the_largest() -> None:
    sharded = plan(parallel__tensor=3).weights_bytes
    assert sharded > plan(parallel__tensor=4).weights_bytes
    blocks = 27 * 2 * (4608 * 1024 + 1024 * 1536 + 2 * 4096 * 1024)
    assert sharded >= 894_717_952 - blocks + blocks // 3


def test_slab_is_the_layout_that_will_be_allocated() -> None:
    made = plan(capacity__patch_capacities="1024,16384", parallel__groups=2)
    layout = SlabLayout.of(PUBLISHED_K3, num_patches=4 * 16_384 * 2, itemsize=2)
    assert (made.slab_patches, made.slab_bytes) == (layout.num_patches, layout.total_bytes)
    assert made.slab_bytes >= total_bytes(made.slab)


def test_a_slab_that_is_set_does_not_shrink_with_the_top_tier() -> None:
    drop = two_tiers(capacity__slab_patches=65_536).dropping_top
    assert drop is not None
    assert drop.slab_bytes == 0
    assert drop.scratch_bytes > 0


def test_steps_add_up_to_the_top_tier() -> None:
    made = plan()
    assert sum(step.scratch_bytes for step in made.steps) == made.scratch_bytes == made.tiers[-1].scratch_bytes
    assert sum(step.slab_bytes for step in made.steps) == made.slab_bytes
    assert sum(step.reference.total_bytes for step in made.steps) == made.tiers[-1].reference.total_bytes


def test_dropping_frees_what_a_plan_without_the_tier_does_not_have() -> None:
    with_top, without = two_tiers(), plan(capacity__patch_capacities=[16384])
    drop = with_top.dropping_top
    assert drop is not None
    assert drop.slab_bytes == with_top.slab_bytes - without.slab_bytes
    assert drop.scratch_bytes == with_top.scratch_bytes - without.scratch_bytes


def test_a_single_tier_has_nothing_to_drop() -> None:
    only = plan(capacity__patch_capacities=1024)
    assert only.dropping_top is None
    assert only.as_dict()["dropping_top_tier_frees"] is None
    assert "Dropping" not in text(only)


def test_largest_pictures_are_admitted_and_one_pixel_more_is_not() -> None:
    tier = plan().tiers[-1]
    assert tier.largest_square == (1792, 1792)
    for (width, height), aspect in ((tier.largest_4_3, 4 / 3), (tier.largest_16_9, 16 / 9)):
        assert fit(width, height, PUBLISHED_K3.processor).patches <= tier.patches
        assert width / height == pytest.approx(aspect, rel=2e-3)
        wider = round((width + 1) / aspect)
        assert fit(width + 1, wider, PUBLISHED_K3.processor).patches > tier.patches


@pytest.mark.parametrize(
    ("top", "never_refuses", "larger"), [(67_316, False, False), (67_320, True, False), (67_324, True, True)]
)
def test_top_tier_is_judged_against_the_largest_count(top: int, never_refuses: bool, larger: bool) -> None:
    made = plan(capacity__patch_capacities=[1024, top])
    assert made.largest_patch_count == 67_320
    assert made.largest_patch_count_size == (1889, 7377)
    assert made.tiers[-1].never_refuses is never_refuses
    assert made.tiers[-1].larger_than_any_image is larger
    assert ("larger than any image" in text(made)) is larger
    assert ("never exceeded" in text(made)) is never_refuses


def test_video_chunks_are_planned_where_the_tower_takes_them() -> None:
    assert plan().as_dict()["video_chunk"] == {"max_frames": 4, "largest_patches": 71_424}
    assert "up to 4 frames" in text(plan()) and "71,424 patches" in text(plan())
    made = plan_capacity(replace(PUBLISHED_K3, pos_emb_time=1), load_settings().settings)
    assert made.as_dict()["video_chunk"] is None
    assert "Video" not in text(made)


def test_k25s_largest_count_is_another() -> None:
    processor = replace(PUBLISHED_K3.processor, patch_limit=16_384)
    made = plan_capacity(replace(PUBLISHED_K3, processor=processor), load_settings().settings)
    assert (made.largest_patch_count, made.largest_patch_count_size) == (17_856, (489, 7081))


def test_illegal_world_size_is_refused_with_the_legal_ones() -> None:
    with pytest.raises(SpecError, match="1, 2, 3, 4, 6, 12"):
        plan(parallel__tensor=8)


def test_policy_in_force_is_shown() -> None:
    made = plan(capacity__policy="downscale", capacity__allow_override="any")
    assert "Policy downscale over 16,384 patches, override any" in text(made)
    assert (made.as_dict()["policy"], made.as_dict()["allow_override"]) == ("downscale", "any")


def test_every_row_of_scratch_is_shown_with_its_formula() -> None:
    made = plan(parallel__tensor=2)
    shown = text(made)
    for row in made.scratch:
        assert row.formula in shown
        assert f"{row.num_bytes:,}" in shown


def test_dict_survives_json() -> None:
    value = plan().as_dict()
    assert json.loads(json.dumps(value)) == value


def test_threads_of_the_settings_count_in_scratch() -> None:
    one = plan(parallel__threads=1)
    assert plan(parallel__threads=8).scratch_bytes > one.scratch_bytes
    assert plan_capacity(PUBLISHED_K3, load_settings().settings, num_cores=1) == one
