import copy
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tp.spec import PUBLISHED_K3, Background, Grid, SpecError, check_world_size, model_note, parse_spec, read_spec

GOLDEN = Path(__file__).parents[1] / "data" / "golden"


def configs(name: str = "tiny-k3-f32") -> tuple[dict[str, Any], dict[str, Any]]:
    folder = GOLDEN / name
    return (
        json.loads((folder / "config.json").read_bytes()),
        json.loads((folder / "preprocessor_config.json").read_bytes()),
    )


def refused(change: Callable[[dict[str, Any], dict[str, Any]], object], name: str = "tiny-k3-f32") -> str:
    config, preprocessor = copy.deepcopy(configs(name))
    change(config, preprocessor)
    with pytest.raises(SpecError) as caught:
        parse_spec(config, preprocessor)
    return str(caught.value)


def test_k3() -> None:
    spec = read_spec(GOLDEN / "tiny-k3-f32")
    assert (spec.model_type, spec.num_layers, spec.hidden_size, spec.qkv_size) == ("kimi_k3", 4, 64, 96)
    assert (spec.num_heads, spec.head_dim, spec.mlp_size, spec.text_hidden_size) == (12, 8, 256, 128)
    assert (spec.norm, spec.has_bias, spec.projector) == ("rmsnorm", False, "post_norm")
    assert (spec.pos_emb_interpolation, spec.projector_prefix, spec.dtype) == ("bilinear", "mm_projector", "float32")
    assert (spec.processor.rule, spec.processor.patch_limit, spec.processor.side_limit) == ("navit", 65_536, 512)
    assert spec.processor.fill_stage == "after_resize"
    assert spec.processor.background == Background("chessboard", square_size=8, gray_value=180)


def test_k25_takes_the_older_defaults_where_keys_are_absent() -> None:
    spec = read_spec(GOLDEN / "tiny-k25-f32")
    assert (spec.model_type, spec.qkv_size, spec.hidden_size) == ("kimi_k25", 96, 96)
    assert (spec.norm, spec.has_bias, spec.projector) == ("layernorm", True, "pre_norm")
    assert (spec.pos_emb_interpolation, spec.pos_emb_time) == ("bicubic", 4)
    assert (spec.processor.patch_limit, spec.processor.background) == (16_384, None)
    assert (spec.processor.frame_patch_limit, spec.processor.chunk_patch_limit) == (4096, None)
    assert (spec.family, spec.takes_video) == ("Kimi K2.5", True)
    assert spec.processor.fill_stage == "before_resize"


def test_kimi_vl_has_no_frames_and_its_own_rule_and_names() -> None:
    spec = read_spec(GOLDEN / "tiny-kimivl-f32")
    assert (spec.model_type, spec.pos_emb_time, spec.text_hidden_size) == ("kimi_vl", 1, 72)
    assert (spec.projector_prefix, spec.projector, spec.projector_norm_eps) == (
        "multi_modal_projector",
        "pre_norm",
        1e-5,
    )
    assert (spec.processor.rule, spec.processor.patch_limit) == ("kimi_vl", 4096)
    assert (spec.family, spec.takes_video) == ("Kimi-VL", False)
    assert spec.processor.fill_stage == "after_resize"


def test_dtype_is_read_from_either_key() -> None:
    assert read_spec(GOLDEN / "tiny-k3-bf16").dtype == "bfloat16"
    assert read_spec(GOLDEN / "tiny-kimivl-bf16").dtype == "bfloat16"


def test_transformers_spelling_is_understood() -> None:
    config, preprocessor = configs("tiny-k25-f32")
    renamed = {
        "vt_hidden_size": "hidden_size",
        "vt_num_hidden_layers": "num_hidden_layers",
        "vt_num_attention_heads": "num_attention_heads",
        "vt_intermediate_size": "intermediate_size",
        "init_pos_emb_height": "pos_emb_height",
        "init_pos_emb_width": "pos_emb_width",
        "init_pos_emb_time": "pos_emb_time",
    }
    vision = {renamed.get(key, key): value for key, value in config["vision_config"].items()}
    assert parse_spec({**config, "vision_config": vision}, preprocessor) == parse_spec(config, preprocessor)
    # All of what transformers 5's own config class writes, its activations, RoPE and projector included.
    native = {
        "model_type": "kimi_k25_vision",
        "hidden_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 12,
        "intermediate_size": 140,
        "pos_emb_height": 16,
        "pos_emb_width": 16,
        "pos_emb_time": 4,
        "patch_size": 14,
        "merge_kernel_size": [2, 2],
        "hidden_act": "gelu_pytorch_tanh",
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "max_position_embeddings": 512,
    }
    own = {**config, "vision_config": native, "projection_hidden_size": 96, "projection_ln_eps": 1e-5}
    assert parse_spec(own, preprocessor) == parse_spec(config, preprocessor)


@pytest.mark.parametrize("name", ["tiny-k3-f32", "tiny-k25-f32", "tiny-kimivl-f32"])
@pytest.mark.parametrize("model_type", ["", None])
def test_a_vision_config_without_its_name_is_told_by_its_keys(name: str, model_type: str | None) -> None:
    config, preprocessor = configs(name)
    expected = parse_spec(config, preprocessor)
    config["vision_config"].pop("model_type", None)
    if model_type is not None:
        config["vision_config"]["model_type"] = model_type
    assert parse_spec(config, preprocessor) == expected


@pytest.mark.parametrize(
    ("name", "family"),
    [("tiny-k3-f32", "Kimi K3"), ("tiny-k25-f32", "Kimi K2.5"), ("tiny-kimivl-f32", "Kimi-VL")],
)
def test_a_later_model_on_a_known_tower_is_taken_with_a_note(name: str, family: str) -> None:
    config, preprocessor = configs(name)
    published = parse_spec(config, preprocessor)
    assert model_note(published) is None
    later = parse_spec({**config, "model_type": "kimi_k31"}, preprocessor)
    assert replace(later, model_type=published.model_type) == published
    note = model_note(later)
    assert note is not None and "'kimi_k31'" in note and family in note


def test_a_known_name_on_another_tower_is_noted_too() -> None:
    config, preprocessor = configs("tiny-k25-f32")
    note = model_note(parse_spec({**config, "model_type": "kimi_k3"}, preprocessor))
    assert note is not None and "Kimi K2.5" in note


@pytest.mark.parametrize("key", ["in_patch_limit_each_frame", "in_patch_limit_video"])
def test_limits_of_frames_may_be_absent_but_not_wrong(key: str) -> None:
    config, preprocessor = configs("tiny-k25-f32")
    for value in (None, 123):
        preprocessor["media_proc_cfg"][key] = value
        processor = parse_spec(config, preprocessor).processor
        assert value in (processor.frame_patch_limit, processor.chunk_patch_limit)
    assert key in refused(lambda _, own: own["media_proc_cfg"].update({key: 0}), "tiny-k25-f32")


@pytest.mark.parametrize(
    "key",
    [
        "vt_hidden_size",
        "vt_num_hidden_layers",
        "vt_num_attention_heads",
        "vt_intermediate_size",
        "init_pos_emb_height",
    ],
)
@pytest.mark.parametrize("value", [None, "64", 0, -1, 1.5, True, 2**31, float("inf")])
def test_a_wrong_number_is_named(key: str, value: object) -> None:
    message = refused(lambda config, _: config["vision_config"].update({key: value}))
    assert message.startswith("config.json: vision_config")
    assert key in message
    assert repr(value) in message


def test_a_missing_key_is_named() -> None:
    assert "vt_hidden_size is missing" in refused(lambda config, _: config["vision_config"].pop("vt_hidden_size"))
    assert "vision_config is missing" in refused(lambda config, _: config.pop("vision_config"))
    assert "model_type is missing" in refused(lambda config, _: config.pop("model_type"))
    message = refused(lambda _, preprocessor: preprocessor["media_proc_cfg"].pop("in_patch_limit"))
    assert message.startswith("preprocessor_config.json")
    assert "in_patch_limit is missing" in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("activation_func", "relu"),
        ("mlp_type", "swiglu"),
        ("merge_type", "concat"),
        ("pos_emb_type", "learned"),
        ("projector_hidden_act", "silu"),
        ("norm_type", "batchnorm"),
        ("mm_projector_type", "mlp"),
        ("pos_emb_interpolation_mode", "nearest"),
        ("merge_kernel_size", [3, 3]),
        ("attn_bias", True),
        ("linear_bias", "no"),
        ("projector_ln_eps", float("nan")),
        ("projector_ln_eps", float("1e999")),
        ("projector_ln_eps", 10**400),
        ("vt_num_hidden_layers", 1025),
        ("vt_num_attention_heads", 10**9),
        ("init_pos_emb_time", 17),
        ("patch_size", 1),
        ("patch_size", 33),
    ],
)
def test_a_tower_that_we_do_not_have_is_refused_by_key(key: str, value: object) -> None:
    assert key in refused(lambda config, _: config["vision_config"].update({key: value}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("image_std", [0.5, 0.0, 0.5]),
        ("image_mean", [0.5, 0.5]),
        ("image_mean", [0.5, 0.5, float("nan")]),
        ("image_mean", [0.5, 0.5, 10**400]),
        ("image_std", [0.5, 0.5, float("inf")]),
        ("in_patch_limit", 10**12),
        ("in_patch_limit", 3),
        ("in_patch_limit_video", 63),
        ("patch_limit_on_one_side", 3),
        ("patch_limit_on_one_side", 513),
        ("merge_kernel_size", 3),
        ("fixed_output_tokens", 64),
        ("patch_size", 16),
        ("transparent_bg_fill_stage", "never"),
        ("transparent_bg_config", "black"),
    ],
)
def test_an_image_rule_that_we_do_not_have_is_refused_by_key(key: str, value: object) -> None:
    message = refused(lambda _, preprocessor: preprocessor["media_proc_cfg"].update({key: value}))
    assert "preprocessor_config.json" in message
    assert key in message


@pytest.mark.parametrize("value", [-1, 256, "180", 1.5])
def test_background_values_are_bytes(value: object) -> None:
    background = {"pattern": "chessboard", "chessboard_gray_value": value}
    message = refused(lambda _, own: own["media_proc_cfg"].update(transparent_bg_config=background))
    assert "chessboard_gray_value" in message


def test_a_black_background_value_is_fine() -> None:
    config, preprocessor = configs()
    preprocessor["media_proc_cfg"]["transparent_bg_config"]["chessboard_gray_value"] = 0
    background = parse_spec(config, preprocessor).processor.background
    assert background is not None
    assert background.gray_value == 0


def test_heads_must_divide_and_the_head_must_rotate() -> None:
    message = refused(lambda config, _: config["vision_config"].update(vt_num_attention_heads=7))
    assert "qkv size 96 is not a multiple of 7 heads" in message
    message = refused(lambda config, _: config["vision_config"].update(vt_num_attention_heads=16))
    assert "head size 6 is not a multiple of 4" in message


def test_text_hidden_size_may_be_in_either_place_but_not_in_none() -> None:
    config, preprocessor = configs()
    config["vision_config"].pop("text_hidden_size")
    assert parse_spec(config, preprocessor).text_hidden_size == 128
    message = refused(lambda config, _: (config["vision_config"].pop("text_hidden_size"), config.pop("text_config")))
    assert "text_hidden_size" in message
    assert "text_config.hidden_size" in message


def test_dtype_we_do_not_compute_in_is_refused() -> None:
    assert "dtype 'int8'" in refused(lambda config, _: config.update(dtype="int8"))


@pytest.mark.parametrize("value", ["x" * 257, "kimi\x1b[31m", "kimi\ud800", 3, None])
def test_a_name_is_short_and_can_be_printed(value: object) -> None:
    message = refused(lambda config, _: config.update(model_type=value))
    assert "model_type must be a short printable string" in message
    assert message.isprintable() and len(message) < 200


@pytest.mark.parametrize(
    ("name", "value"), [("vt_num_hidden_layers", "9" * 10_000), ("vt_hidden_size", [[[["deep"] * 99] * 99] * 99] * 99)]
)
def test_a_long_value_is_cut_short_in_the_message(name: str, value: object) -> None:
    assert len(refused(lambda config, _: config["vision_config"].update({name: value}))) < 500


@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json"])
def test_a_file_that_cannot_be_read_is_named_at_once(tmp_path: Path, name: str) -> None:
    """A pipe would never end, and neither would what /dev/zero holds."""
    folder = Path(shutil.copytree(GOLDEN / "tiny-k3-f32", tmp_path / "model"))
    damages: list[tuple[Callable[[Path], object], str]] = [
        (os.mkfifo, "is not a regular file"),
        (Path.mkdir, "is not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "is not a regular file"),
        (lambda path: path.symlink_to("/nowhere"), "does not exist"),
        (lambda path: path.write_text('{"a":' + "[" * 200_000), "cannot be read: maximum recursion depth"),
        (lambda path: path.write_text("9" * 5000), "cannot be read: Exceeds the limit"),
        (lambda path: path.write_bytes(b'{"\xff": 1}'), "cannot be read: 'utf-8' codec"),
        (lambda path: (path.touch(), os.truncate(path, 10**9)), "has 1,000,000,000 bytes, more than the"),
    ]
    for damage, words in damages:
        (folder / name).rmdir() if (folder / name).is_dir() else (folder / name).unlink()
        damage(folder / name)
        with pytest.raises(SpecError, match=words) as caught:
            read_spec(folder)
        assert name in str(caught.value)


def test_what_no_screen_should_get_is_escaped(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"a\\x1b\[31m\\udc80é") as caught:
        read_spec(tmp_path / "a\x1b[31m\udc80é")
    assert str(caught.value).isprintable()


def test_files_at_fault_are_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"config\.json does not exist"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SpecError, match=r"config\.json cannot be read"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(SpecError, match="does not hold a JSON object"):
        read_spec(tmp_path)


def test_legal_world_sizes_divide_the_heads() -> None:
    assert PUBLISHED_K3.legal_world_sizes == (1, 2, 3, 4, 6, 12)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 12])
def test_legal_world_size_passes(world_size: int) -> None:
    check_world_size(PUBLISHED_K3, world_size)


def test_illegal_world_size_names_heads_legal_sizes_and_a_layout_for_all_devices() -> None:
    with pytest.raises(SpecError) as caught:
        check_world_size(PUBLISHED_K3, 8)
    message = str(caught.value)
    assert "world size 8" in message
    assert "12 attention heads" in message
    assert "1, 2, 3, 4, 6, 12" in message
    assert "To use 8 devices: 2 group(s) of 4 (parallel.groups=2, parallel.tensor=4)" in message


@pytest.mark.parametrize(("devices", "groups", "size"), [(16, 4, 4), (7, 7, 1), (18, 3, 6), (24, 2, 12)])
def test_layout_uses_every_device(devices: int, groups: int, size: int) -> None:
    with pytest.raises(SpecError, match=rf"{groups} group\(s\) of {size} "):
        check_world_size(PUBLISHED_K3, 5, num_devices=devices)


def test_grid_counts() -> None:
    grid = Grid(1, 52, 92)
    assert (grid.num_patches, grid.num_tokens) == (4784, 1196)
    assert (Grid(4, 2, 2).num_patches, Grid(4, 2, 2).num_tokens) == (16, 1)


@pytest.mark.parametrize(
    ("num_patches", "tera"), [(256, 0.220), (1024, 1.011), (4096, 6.130), (16_384, 57.92), (65_536, 766.0)]
)
def test_flops_are_those_of_model_facts(num_patches: int, tera: float) -> None:
    flops = PUBLISHED_K3.linear_flops * num_patches + PUBLISHED_K3.attention_flops * num_patches**2
    assert flops / 1e12 == pytest.approx(tera, rel=3e-3)


def test_attention_costs_as_much_as_the_rest_at_k() -> None:
    assert PUBLISHED_K3.linear_flops / PUBLISHED_K3.attention_flops == pytest.approx(4925, abs=1)
    assert PUBLISHED_K3.cost(4925) == pytest.approx(2 * 4925, rel=1e-3)


def test_k25s_constant_counts_patch_embedding_and_projector_too() -> None:
    published = replace(
        PUBLISHED_K3, hidden_size=1152, qkv_size=1152, num_heads=16, mlp_size=4304, text_hidden_size=7168
    )
    assert published.linear_flops / published.attention_flops == pytest.approx(6837, abs=1)
    blocks = 27 * 2 * 1152 * (4 * 1152 + 2 * 4304)
    assert blocks / published.attention_flops == pytest.approx(6608, abs=1)


def test_as_dict_is_plain_json() -> None:
    value = PUBLISHED_K3.as_dict()
    assert json.loads(json.dumps(value)) == value
    assert value["processor"]["background"]["pattern"] == "chessboard"


@pytest.mark.parametrize(
    ("num_patches", "tflops"), [(256, 0.220), (1024, 1.011), (4096, 6.130), (16_384, 57.92), (65_536, 766.0)]
)
def test_flops_of_published_k3(num_patches: int, tflops: float) -> None:
    assert PUBLISHED_K3.flops(num_patches) / 1e12 == pytest.approx(tflops, rel=2e-3)


def test_flops_are_the_matrix_products_alone() -> None:
    blocks = 792_723_456  # 27 x 2 x (1024 x 4608 + 1536 x 1024 + 2 x 1024 x 4096)
    patch_embedding, projector, attention = 2 * 588 * 1024, 23_068_672, 165_888
    assert PUBLISHED_K3.flops(1024) == 1024 * (blocks + patch_embedding + projector) + 1024**2 * attention


def test_the_squarest_grid_of_a_count() -> None:
    assert Grid.squarest(1024) == (1, 32, 32)
    assert Grid.squarest(24) == (1, 4, 6)
    assert Grid.squarest(28) == (1, 2, 14)  # 7 tokens
