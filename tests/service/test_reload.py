"""What a running service takes over of new settings, by values alone."""

import pytest

from service.reload import Reload, reload
from tp.settings import RELOADABLE, Settings, known_names, load_settings

START = {"capacity.patch_capacities": [64, 256], "limits.max_queue_s": 7, "cache.max_bytes": 1000}
STARTED = load_settings(flags=START).settings


def wanting(**flags: object) -> Reload:
    wanted = {name.replace("__", "."): value for name, value in flags.items()}
    return reload(STARTED, STARTED, load_settings(flags={**START, **wanted}).settings)


def test_the_same_settings_change_nothing() -> None:
    assert wanting() == Reload(STARTED, (), ())


def test_several_sections_at_once() -> None:
    found = wanting(capacity__policy="downscale", limits__max_queue_s=9, server__api_keys_file="/keys")
    assert found.changed == ("capacity.policy", "limits.max_queue_s", "server.api_keys_file")
    assert found.held_back == ()
    assert (found.settings.capacity.policy, found.settings.limits.max_queue_s) == ("downscale", 9)
    assert found.settings.capacity.patch_capacities == (64, 256)


@pytest.mark.parametrize("tiers", [(64,), (256,), (4, 8, 256), (100, 252), (16, 32, 64, 128)])
def test_tiers_up_to_the_top_one_at_the_start(tiers: tuple[int, ...]) -> None:
    found = wanting(capacity__patch_capacities=list(tiers))
    assert (found.settings.capacity.patch_capacities, found.held_back) == (tiers, ())


def test_a_tier_over_the_top_one_at_the_start_is_not_taken_over_in_part() -> None:
    found = wanting(capacity__patch_capacities=[16, 260], capacity__policy="downscale")
    assert found.settings.capacity.patch_capacities == (64, 256)
    assert found.settings.capacity.policy == "downscale"
    (sentence,) = found.held_back
    assert sentence == (
        "capacity.patch_capacities stays 64,256: 16,260 needs a restart, since slab and ranks were started for a top "
        "tier of 256"
    )


def test_the_top_tier_may_go_down_and_up_again() -> None:
    lower = wanting(capacity__patch_capacities=[64]).settings
    assert reload(STARTED, lower, STARTED) == Reload(STARTED, ("capacity.patch_capacities",), ())


@pytest.mark.parametrize(("timeout_s", "taken"), [(30, True), (659, True), (660, False), (3600, False)])
def test_a_batch_must_time_out_before_a_collective(timeout_s: float, taken: bool) -> None:
    found = wanting(limits__batch_timeout_s=timeout_s)
    assert (found.settings.limits.batch_timeout_s == timeout_s) is taken
    assert taken or "660 s" in found.held_back[0]


def test_the_cache_may_shrink_and_grow_again_but_not_over_what_memory_was_checked_for() -> None:
    smaller, larger = (load_settings(flags={**START, "cache.max_bytes": size}).settings for size in (0, 1001))
    assert (
        reload(STARTED, STARTED, smaller).changed == reload(STARTED, smaller, STARTED).changed == ("cache.max_bytes",)
    )
    (sentence,) = reload(STARTED, smaller, larger).held_back
    assert sentence == (
        "cache.max_bytes stays 0: 1001 needs a restart, since memory was checked for 1000 bytes of it at the start"
    )


def test_everything_else_is_named_and_stays() -> None:
    found = wanting(capacity__slab_patches=4096, parallel__tensor=3, server__cors_origins="https://a", urls__fetch="on")
    assert found.settings == STARTED
    assert [sentence.split(" stays ")[0] for sentence in found.held_back] == [
        "parallel.tensor",
        "capacity.slab_patches",
        "urls.fetch",
        "server.cors_origins",
    ]
    assert found.held_back[1] == "capacity.slab_patches stays unset: 4096 needs a restart"


def test_keys_are_never_switched_off() -> None:
    keyed = wanting(server__api_keys_file="/keys").settings
    assert reload(STARTED, keyed, STARTED) == Reload(
        keyed,
        (),
        ("server.api_keys_file stays /keys: unset needs a restart, since anyone could call without keys",),
    )


def test_what_is_held_back_is_named_again_at_the_next_reload() -> None:
    wanted = load_settings(flags={**START, "parallel.tensor": 2}).settings
    first = reload(STARTED, STARTED, wanted)
    second = reload(STARTED, first.settings, wanted)
    assert (second.changed, second.held_back) == ((), first.held_back)


VALUES = {
    "capacity.patch_capacities": [64],
    "capacity.policy": "downscale",
    "capacity.allow_override": "any",
    "limits.batch_timeout_s": 59.0,
    "limits.max_header_bytes": 2048,
    "server.api_keys_file": "/keys",
}


@pytest.mark.parametrize("name", RELOADABLE)
def test_each_setting_that_is_said_to_be_reloadable_is_taken_over(name: str) -> None:
    assert wanting(**{name: VALUES.get(name, 5)}).changed == (name,)


def test_a_new_setting_needs_a_restart_unless_somebody_decides() -> None:
    sections = {name.split(".")[0] for name, _ in known_names() if name not in RELOADABLE}
    assert not {"limits", "cache"} & sections, "all of these are reloadable today; add the new one, and a test to it"
    assert Settings.model_fields.keys() - {"limits", "cache"} <= sections
