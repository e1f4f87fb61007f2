import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tp.settings import (
    RELOADABLE,
    SOCKET_PATH_BYTES,
    Settings,
    SettingsError,
    as_environ,
    known_names,
    load_settings,
)
from tp.spec import PUBLISHED_K3

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=200)
TIERS = st.lists(st.integers(1, 20_000), min_size=1, max_size=6, unique=True).map(
    lambda quarters: [4 * quarter for quarter in sorted(quarters)]
)


def written(folder: Path, text: str) -> Path:
    path = folder / "settings.yaml"
    path.write_text(text)
    return path


def refused(config: Path | None = None, **layers: object) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings(config, **layers)  # type: ignore[arg-type]
    return str(caught.value)


def tiers(value: object) -> tuple[int, ...]:
    return load_settings(flags={"capacity.patch_capacities": value}).settings.capacity.patch_capacities


def test_nothing_set_gives_the_designs_defaults() -> None:
    loaded = load_settings()
    settings = loaded.settings
    assert settings.capacity.patch_capacities == (1024, 4096, 16_384)
    assert (settings.capacity.policy, settings.capacity.allow_override) == ("refuse", "stricter")
    assert settings.slab_patches == 4 * 16_384
    assert settings.model.rms_norm_eps == 2.0**-23
    assert (settings.image.orientation, settings.image.gray16) == ("apply", "scale")
    assert (settings.limits.max_body_bytes, settings.limits.max_image_pixels) == (67_108_864, 89_478_485)
    assert (settings.limits.max_images_per_request, settings.limits.request_timeout_s) == (64, 300)
    assert dict(loaded.sources) == {}


def test_later_layers_win_and_sources_say_which(tmp_path: Path) -> None:
    path = written(tmp_path, "server: {host: file, port: 1}\nmodel: {name: from-file}\nparallel: {tensor: 3}\n")
    loaded = load_settings(
        path,
        environ={"TPVISION_SERVER__PORT": "2", "TPVISION_SERVER__HOST": "environment"},
        flags={"server.host": "flag"},
    )
    server = loaded.settings.server
    assert (server.host, server.port, loaded.settings.model.name) == ("flag", 2, "from-file")
    assert dict(loaded.sources) == {
        "server.host": "flag server.host",
        "server.port": "environment TPVISION_SERVER__PORT",
        "model.name": f"file {path}",
        "parallel.tensor": f"file {path}",
    }


def test_environment_that_is_not_ours_is_left_alone() -> None:
    environ = {"TPVISION_PORT": "tcp://10.0.0.1:80", "TPVISION_PORT_8000_TCP": "x", "PATH": "/bin", "OTHER__A": "1"}
    assert load_settings(environ=environ).settings == Settings()


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("capacity.patch_capacity", "capacity.patch_capacities"),
        ("capacities.policy", "capacity.policy"),
        ("server.prot", "server.port"),
        ("tensor", "parallel.tensor"),
    ],
)
def test_unknown_key_names_its_source_and_the_nearest_known_one(name: str, near: str) -> None:
    message = refused(flags={name: 1})
    assert message == f"flag {name}: unknown setting {name}; the nearest known one is {near}"


def test_unknown_key_in_file_and_environment(tmp_path: Path) -> None:
    path = written(tmp_path, "parallel: {tensors: 2}\n")
    assert refused(path) == f"file {path}: unknown setting parallel.tensors; the nearest known one is parallel.tensor"
    message = refused(environ={"TPVISION_MODEL__PATHS": "x"})
    assert message.startswith("environment TPVISION_MODEL__PATHS: unknown setting model.paths; the nearest")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[1, 2]", "does not hold a mapping of sections"),
        ("model: 3", "model must be a section of settings, not int"),
        ("model: {", "cannot be read: line 1: expected the node content"),
        ("model: {name: 2021-13-45}", "month must be in 1..12"),
        ("model: " + "[" * 1500, "cannot be read"),
        ("modell:", "unknown setting modell; the nearest known one is model."),
        ("5: {a: 1}", "unknown setting 5.a"),
    ],
)
def test_a_malformed_file_is_named(tmp_path: Path, text: str, reason: str) -> None:
    path = written(tmp_path, text)
    message = refused(path)
    assert str(path) in message
    assert reason in message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert str(tmp_path / "none.yaml") in refused(tmp_path / "none.yaml")


@pytest.mark.parametrize("text", ["", "# nothing\n", "model:\n  # path: x\nserver: {port: 0}\n"])
def test_empty_files_and_sections_are_fine(tmp_path: Path, text: str) -> None:
    assert load_settings(written(tmp_path, text)).settings.capacity == Settings().capacity


def test_a_wrong_value_is_named_with_its_source() -> None:
    message = refused(environ={"TPVISION_PARALLEL__TENSOR": "0", "TPVISION_SERVER__PORT": "99999"})
    assert "parallel.tensor (environment TPVISION_PARALLEL__TENSOR): Input should be greater than or equal to 1" in (
        message
    )
    assert "server.port (environment TPVISION_SERVER__PORT): Input should be less than or equal to 65535" in message


@pytest.mark.parametrize("text", ["*", "*.example.org", "::", "[", "2021-13-45", "2021-12-13", "a: b", "[" * 1500])
def test_a_variable_that_yaml_reads_otherwise_is_its_text(text: str) -> None:
    assert load_settings(environ={"TPVISION_SERVER__HOST": text}).settings.server.host == text


def test_wildcards_need_no_quotes_in_the_environment() -> None:
    environ = {"TPVISION_SERVER__CORS_ORIGINS": "*", "TPVISION_URLS__ALLOWED_HOSTS": "*.example.org,example.com"}
    settings = load_settings(environ=environ).settings
    assert settings.server.cors_origins == ("*",)
    assert settings.urls.allowed_hosts == ("*.example.org", "example.com")


@pytest.mark.parametrize("name", ["server.port", "server.probe_port", "limits.max_queue_s", "capacity.slab_patches"])
def test_true_is_no_number(name: str) -> None:
    assert refused(flags={name: True}).endswith("a number is wanted, not true")


@pytest.mark.parametrize("value", ["1024,4096", "1024, 4096,", [1024, 4096], (1024, 4096), ["1024", "4096"]])
def test_tiers_may_be_a_list_or_text_with_commas(value: object) -> None:
    assert tiers(value) == (1024, 4096)


@pytest.mark.parametrize("value", [16_384, "16384", [16_384]])
def test_a_single_tier_may_be_a_bare_number(value: object) -> None:
    assert tiers(value) == (16_384,)
    assert load_settings(environ={"TPVISION_CAPACITY__PATCH_CAPACITIES": "16384"}).settings.slab_patches == 65_536


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([4096, 1024], "capacity tiers must ascend, but 1024 follows 4096"),
        ([1024, 1024], "capacity tiers must ascend, but 1024 follows 1024"),
        ([1022, 4096], "capacity tier 1022 is not a positive multiple of 4"),
        ([0, 4096], "capacity tier 0 is not a positive multiple of 4"),
        ([-4], "capacity tier -4 is not a positive multiple of 4"),
        ("", "at least one capacity tier is needed"),
        ([], "at least one capacity tier is needed"),
        ("1024,many", "unable to parse"),
        ([10.5], "fractional part"),
    ],
)
def test_other_tiers_stop_the_start_with_the_reason(value: object, reason: str) -> None:
    message = refused(flags={"capacity.patch_capacities": value})
    assert message.startswith("capacity.patch_capacities (flag capacity.patch_capacities)")
    assert reason in message


def test_what_can_be_reloaded_are_settings() -> None:
    names = [name for name, _ in known_names()]
    assert [name for name in RELOADABLE if name not in names] == []


def test_a_file_that_may_block_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(SettingsError, match="fifo cannot be read: not a regular file"):
        load_settings(tmp_path / "fifo")


@pytest.mark.parametrize("text", ["a: 2020-99-99", "[" * 1500, "a: [", "\x00", "? [a]: b\n? {b}: c"])
def test_a_file_that_is_no_yaml_is_a_settings_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=r"config.yaml cannot be read"):
        load_settings(path)


@pytest.mark.parametrize("slab_patches", [16_380, 16_386, 0, -4])
def test_a_slab_under_the_top_tier_is_refused_with_both(slab_patches: int) -> None:
    message = refused(flags={"capacity.slab_patches": slab_patches})
    assert f"slab_patches {slab_patches} must be a multiple of 4 and at least the top tier 16384" in message


def test_slab_grows_with_groups_unless_it_is_set() -> None:
    two = {"parallel.groups": 2}
    assert load_settings(flags=two).settings.slab_patches == 8 * 16_384
    assert load_settings(flags={**two, "capacity.slab_patches": 16_384}).settings.slab_patches == 16_384


def test_external_workers_need_a_socket() -> None:
    external = {"parallel.workers": "external"}
    assert "parallel.workers external needs parallel.socket" in refused(flags=external)
    settings = load_settings(flags={**external, "parallel.socket": "/run/tpvision/control"}).settings
    assert settings.parallel.socket == Path("/run/tpvision/control")


def test_a_socket_path_the_kernel_cannot_hold_is_refused_with_its_length() -> None:
    longest = "/" + "s" * (SOCKET_PATH_BYTES - 1)
    assert load_settings(flags={"parallel.socket": longest}).settings.parallel.socket == Path(longest)
    message = refused(flags={"parallel.socket": longest + "s"})
    assert "a socket path of 108 bytes; the limit is 107" in message


def test_a_socket_path_is_measured_in_bytes() -> None:
    assert "a socket path of 121 bytes" in refused(flags={"parallel.socket": "/" + "é" * 60})


def test_receivers_are_addresses_networks_and_names() -> None:
    receivers = ("10.0.0.0/16", "10.1.2.3", "fd00::/8", "::1", "prefill-0", "*.example.org")
    settings = load_settings(environ={"TPVISION_HANDOFF__SGLANG_RECEIVERS": ",".join(receivers).upper()}).settings
    assert settings.handoff.sglang_receivers == receivers
    assert load_settings(environ=as_environ(settings)).settings == settings


@pytest.mark.parametrize(
    "receiver", ["10.0.0.1/8", "10.0.0.256", "10.0", "127.1", "10.0.0.1:5000", "*", "tcp://a", "a b"]
)
def test_a_receiver_that_is_none_of_these_is_named(receiver: str) -> None:
    message = refused(flags={"handoff.sglang_receivers": receiver})
    assert message.startswith("handoff.sglang_receivers (") and receiver in message


def test_dtype_auto_is_the_checkpoints() -> None:
    assert load_settings().settings.compute_dtype(PUBLISHED_K3) == "bfloat16"
    assert load_settings(flags={"model.dtype": "float32"}).settings.compute_dtype(PUBLISHED_K3) == "float32"


def test_every_setting_says_what_it_is() -> None:
    assert [name for name, field in known_names() if not field.description] == []


@hypothesis_settings(deadline=None)  # the machine may be busy
@given(
    name=TEXT,
    host=TEXT,
    origins=st.lists(TEXT.filter(lambda text: "," not in text and text == text.strip()), max_size=3),
    capacities=TIERS,
    eps=st.floats(1e-12, 0.5),
    timeout_s=st.floats(0.001, 1e9) | st.integers(1, 10**9),
    max_body_bytes=st.integers(1, 2**62),
)
def test_environment_gives_the_same_settings_again(
    *,
    name: str,
    host: str,
    origins: list[str],
    capacities: list[int],
    eps: float,
    timeout_s: float,
    max_body_bytes: int,
) -> None:
    settings = load_settings(
        flags={
            "model.name": name,
            "model.path": "/models/Kimi K3: the 1st #1",
            "model.rms_norm_eps": eps,
            "server.host": host,
            "server.cors_origins": origins,
            "capacity.patch_capacities": capacities,
            "limits.request_timeout_s": timeout_s,
            "limits.max_body_bytes": max_body_bytes,
        }
    ).settings
    assert load_settings(environ=as_environ(settings)).settings == settings


@pytest.mark.parametrize(
    "name", ["1e5", "on", "null", "~", "0x10", "12:30", "a: b", "- x", "...", "x" * 300, "a b " * 40]
)
def test_names_that_yaml_would_read_otherwise_survive_the_environment(name: str) -> None:
    settings = load_settings(flags={"model.name": name}).settings
    assert load_settings(environ=as_environ(settings)).settings.model.name == name
