import hashlib
import io
import json
from pathlib import Path

import numpy as np
import pytest
from make_photograph import PHOTOGRAPH, acceptance_picture
from PIL import Image
from safetensors import safe_open

from service.demo_model import DemoModelError, demo_config, demo_preprocessor_config, write_demo_model
from tp.spec import PUBLISHED_K3, Dtype, parse_spec, read_spec

SHARDS = [f"model-0000{number}-of-000003.safetensors" for number in (1, 2, 3)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo") / "model"
    write_demo_model(out, size="tiny")
    return out


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def keys(path: Path) -> list[str]:
    with safe_open(path, "np") as file:
        return list(file.keys())


def shapes(config: dict[str, object]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of model_facts.md, section 1."""
    vision = config["vision_config"]
    assert isinstance(vision, dict)
    hidden, qkv, mlp = vision["vt_hidden_size"], vision["qkv_hidden_size"], vision["vt_intermediate_size"]
    text = vision["text_hidden_size"]
    found = {
        "vision_tower.patch_embed.proj.weight": (hidden, 3, 14, 14),
        "vision_tower.patch_embed.pos_emb.weight": (64, 64, hidden),
        "vision_tower.encoder.final_layernorm.weight": (hidden,),
        "mm_projector.proj.0.weight": (4 * hidden, 4 * hidden),
        "mm_projector.proj.2.weight": (text, 4 * hidden),
        "mm_projector.post_norm.weight": (text,),
    }
    for layer in range(vision["vt_num_hidden_layers"]):
        block = f"vision_tower.encoder.blocks.{layer}."
        found |= {block + "norm0.weight": (hidden,), block + "norm1.weight": (hidden,)}
        found |= {block + "wqkv.weight": (3 * qkv, hidden), block + "wo.weight": (hidden, qkv)}
        found |= {block + "mlp.fc0.weight": (mlp, hidden), block + "mlp.fc1.weight": (hidden, mlp)}
    return found


def test_full_config_reads_back_as_the_published_k3() -> None:
    assert parse_spec(demo_config("full"), demo_preprocessor_config()) == PUBLISHED_K3


def test_tiny_differs_from_the_published_k3_in_shape_and_dtype_alone(tiny: Path) -> None:
    spec = read_spec(tiny)
    assert (spec.num_layers, spec.num_heads, spec.head_dim, spec.hidden_size) == (4, 12, 8, 64)
    assert (spec.mlp_size, spec.text_hidden_size, spec.dtype) == (256, 128, "float32")
    assert spec.processor == PUBLISHED_K3.processor
    assert (spec.norm, spec.has_bias, spec.projector) == ("rmsnorm", False, "post_norm")
    assert (spec.pos_emb_height, spec.pos_emb_width) == (64, 64)


def test_preprocessor_config_is_the_one_of_the_goldens() -> None:
    golden = Path(__file__).parents[1] / "data" / "golden" / "preprocess_configs.json"
    assert demo_preprocessor_config()["media_proc_cfg"] == json.loads(golden.read_bytes())["k3"]["published"]


def test_vision_tensors_have_the_published_names_and_shapes(tiny: Path) -> None:
    found = {}
    for name in SHARDS[1:]:
        with safe_open(tiny / name, "np") as file:
            found |= {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    assert found == shapes(demo_config("tiny"))


def test_tower_is_in_the_last_shard_projector_before_it_decoys_in_the_first(tiny: Path) -> None:
    prefixes = [{key.split(".")[0] for key in keys(tiny / name)} for name in SHARDS]
    assert prefixes == [{"language_model"}, {"mm_projector"}, {"vision_tower"}]


def test_index_places_every_tensor_and_counts_the_bytes(tiny: Path) -> None:
    index = json.loads((tiny / "model.safetensors.index.json").read_bytes())
    assert index["weight_map"] == {key: name for name in SHARDS for key in keys(tiny / name)}
    data_bytes = 0
    for name in SHARDS:
        with (tiny / name).open("rb") as file:
            data_bytes += (tiny / name).stat().st_size - 8 - int.from_bytes(file.read(8), "little")
    assert index["metadata"]["total_size"] == data_bytes


def test_same_seed_same_bytes_another_seed_others(tiny: Path, tmp_path: Path) -> None:
    write_demo_model(tmp_path / "again", size="tiny", seed=0)
    write_demo_model(tmp_path / "other", size="tiny", seed=1)
    assert digests(tmp_path / "again") == digests(tiny)
    other = digests(tmp_path / "other")
    assert [name for name in SHARDS if other[name] == digests(tiny)[name]] == []


def test_weights_keep_unit_inputs_at_unit_size(tiny: Path) -> None:
    with safe_open(tiny / SHARDS[2], "np") as file:
        qkv = file.get_tensor("vision_tower.encoder.blocks.0.wqkv.weight")
        norm = file.get_tensor("vision_tower.encoder.blocks.0.norm0.weight")
    inputs = np.random.default_rng(0).standard_normal((256, 64))
    assert np.std(inputs @ qkv.T) == pytest.approx(1, abs=0.05)
    assert np.mean(norm) == pytest.approx(1, abs=0.05)


def test_a_demo_model_is_replaced(tmp_path: Path) -> None:
    write_demo_model(tmp_path, size="tiny", seed=1)
    before = digests(tmp_path)
    write_demo_model(tmp_path, size="tiny", seed=2)
    assert digests(tmp_path).keys() == before.keys()
    assert digests(tmp_path)[SHARDS[2]] != before[SHARDS[2]]


def test_a_file_that_is_mapped_keeps_its_bytes_when_replaced(tmp_path: Path) -> None:
    write_demo_model(tmp_path, size="tiny", seed=1)
    with (tmp_path / SHARDS[2]).open("rb") as opened:
        write_demo_model(tmp_path, size="tiny", seed=2)
        assert hashlib.sha256(opened.read()).hexdigest() != digests(tmp_path)[SHARDS[2]]


def test_another_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DemoModelError, match="not a demo model"):
        write_demo_model(tmp_path, size="tiny")
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DemoModelError, match="not a folder"):
        write_demo_model(tmp_path / "file", size="tiny")


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    write_demo_model(tmp_path, size="tiny", progress=lambda written, total: seen.append((written, total)))
    assert [written for written, _ in seen] == sorted({written for written, _ in seen})
    assert seen[-1][0] == seen[-1][1]
    assert len({total for _, total in seen}) == 1


@pytest.mark.slow
def test_full_size_has_k3s_shapes_and_bytes(tmp_path: Path) -> None:
    write_demo_model(tmp_path, size="full")
    assert read_spec(tmp_path) == PUBLISHED_K3
    dtype: Dtype = read_spec(tmp_path).dtype
    assert dtype == "bfloat16"
    found, vision_bytes = {}, 0
    for name in SHARDS[1:]:
        with (tmp_path / name).open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for key, entry in header.items():
            if key != "__metadata__":
                found[key] = tuple(entry["shape"])
                vision_bytes += entry["data_offsets"][1] - entry["data_offsets"][0]
    assert found == shapes(demo_config("full"))
    assert vision_bytes == 894_717_952


def test_photograph_is_small_and_says_where_it_is_from() -> None:
    assert PHOTOGRAPH.stat().st_size < 250_000
    with Image.open(PHOTOGRAPH) as photograph:
        assert (photograph.format, photograph.mode, photograph.size) == ("JPEG", "RGB", (1280, 960))
        assert b"CC0" in photograph.info["comment"]


def test_acceptance_picture_is_the_largest_square_that_is_admitted() -> None:
    with Image.open(io.BytesIO(acceptance_picture())) as picture:
        assert picture.size == (1792, 1792)
    with Image.open(io.BytesIO(acceptance_picture(1820, 1792))) as picture:
        assert picture.size == (1820, 1792)
