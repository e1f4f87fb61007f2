from pathlib import Path
from shutil import copytree

import pytest
import torch
from goldens import GOLDEN, MODELS, spec_of
from safetensors.torch import load_file
from torch import Tensor

from tp.checkpoint import CheckpointError, expected_tensors, read_vision_tensors
from tp.model import MoonViT
from tp.parallel import TPGroup
from tp.weights import load_weights, parameter_names

BLOCK = "vision_tower.encoder.blocks.0"


def stored(model: str, precision: str = "f32") -> dict[str, Tensor]:
    files = (GOLDEN / f"{model}-{precision}").glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def load(model: str, rank: int = 0, world_size: int = 1, **options: object) -> MoonViT:
    spec = spec_of(model)
    moonvit = MoonViT(spec, TPGroup(rank=rank, world_size=world_size, device=torch.device("cpu")))
    table = read_vision_tensors(GOLDEN / f"{model}-f32", spec)
    load_weights(moonvit, table, **{"dtype": torch.float32, **options})
    return moonvit


@pytest.mark.parametrize("model", MODELS)
def test_names_cover_both_sides_once(model: str) -> None:
    names = parameter_names(spec_of(model))
    theirs = {name if name in names else name.rpartition(".")[0] for name in expected_tensors(spec_of(model))}
    ours = {name if name == "pos_emb" else name.rpartition(".")[0] for name, _ in load(model).named_parameters()}
    assert theirs == set(names)
    assert ours == set(names.values())
    assert len(ours) == len(names)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("world_size", [1, 3])
def test_no_parameter_is_left_without_a_value(model: str, world_size: int) -> None:
    for rank in range(world_size):
        loaded = load(model, rank, world_size)
        assert not [name for name, parameter in loaded.named_parameters() if parameter.is_meta]


def test_qkv_rows_are_sliced_separately() -> None:
    # 12 heads of 8 over 3 ranks: rank 1 has rows 32-64 of each of q, k, v (96 rows each)
    full = stored("tiny-k3")[f"{BLOCK}.wqkv.weight"]
    expected = torch.cat([full[32:64], full[96 + 32 : 96 + 64], full[192 + 32 : 192 + 64]])
    assert torch.equal(load("tiny-k3", 1, 3).get_parameter("blocks.0.qkv.weight"), expected)


def test_qkv_bias_is_sliced_alike() -> None:
    full = stored("tiny-k25")[f"{BLOCK}.wqkv.bias"]
    expected = torch.cat([full[48:96], full[96 + 48 : 192], full[192 + 48 : 288]])
    assert torch.equal(load("tiny-k25", 1, 2).get_parameter("blocks.0.qkv.bias"), expected)


@pytest.mark.parametrize(
    ("theirs", "ours", "dim"),
    [
        ("wo.weight", "wo.weight", 1),
        ("mlp.fc0.weight", "fc0.weight", 0),
        ("mlp.fc0.bias", "fc0.bias", 0),
        ("mlp.fc1.weight", "fc1.weight", 1),
    ],
)
def test_uneven_shards_make_up_the_whole(theirs: str, ours: str, dim: int) -> None:
    shards = [load("tiny-k25", rank, 3).get_parameter(f"blocks.0.{ours}") for rank in range(3)]
    assert torch.equal(torch.cat(list(shards), dim), stored("tiny-k25")[f"{BLOCK}.{theirs}"])


@pytest.mark.parametrize("name", ["wo.bias", "mlp.fc1.bias"])
def test_row_parallel_biases_are_whole_on_every_rank(name: str) -> None:
    ours = load("tiny-k25", 2, 3).get_parameter(f"blocks.0.{name.removeprefix('mlp.')}")
    assert torch.equal(ours, stored("tiny-k25")[f"{BLOCK}.{name}"])


def test_patch_embedding_keeps_channel_row_column_order() -> None:
    full = stored("tiny-k3")["vision_tower.patch_embed.proj.weight"]
    weight = load("tiny-k3").get_parameter("patch_embed.weight")
    assert weight[5, 196 + 14 + 3] == full[5, 1, 1, 3]
    assert torch.equal(weight, full.flatten(1))


def test_parameters_own_their_memory() -> None:
    weight = load("tiny-k3", 0, 2).get_parameter("blocks.0.wo.weight")
    assert weight.is_contiguous()
    assert weight.untyped_storage().nbytes() == weight.nbytes


def test_cast_rounds_to_nearest() -> None:
    weight = load("tiny-k3", dtype=torch.bfloat16).get_parameter("blocks.1.fc0.weight")
    assert torch.equal(weight, stored("tiny-k3", "bf16")["vision_tower.encoder.blocks.1.mlp.fc0.weight"])


@pytest.mark.parametrize("world_size", [1, 3])
def test_progress_counts_this_ranks_bytes(world_size: int) -> None:
    calls: list[tuple[int, int]] = []
    model = load("tiny-k25", world_size - 1, world_size, on_progress=lambda *call: calls.append(call))
    total = sum(parameter.nbytes for parameter in model.parameters())
    assert calls[-1] == (total, total)
    assert [loaded for loaded, _ in calls] == sorted({loaded for loaded, _ in calls})


def test_a_parameter_without_a_tensor_is_named() -> None:
    spec = spec_of("tiny-k3")
    table = read_vision_tensors(GOLDEN / "tiny-k3-f32", spec)
    del table["vision_tower.encoder.final_layernorm.weight"]
    with pytest.raises(CheckpointError, match=r"no value for final_norm.weight"):
        load_weights(MoonViT(spec, TPGroup.single()), table, dtype=torch.float32)


def test_a_file_lost_after_the_check_is_named(tmp_path: Path) -> None:
    spec, folder = spec_of("tiny-k3"), copytree(GOLDEN / "tiny-k3-f32", tmp_path / "model")
    table = read_vision_tensors(folder, spec)
    lost = table[f"{BLOCK}.wqkv.weight"].file
    lost.unlink()
    with pytest.raises(CheckpointError, match=f"{lost.name} cannot be read"):
        load_weights(MoonViT(spec, TPGroup.single()), table, dtype=torch.float32)
