import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from goldens import GOLDEN, MANIFEST, MODELS, spec_of
from safetensors.torch import load_file, save_file
from torch import Tensor

from tp.checkpoint import (
    INDEX_NAME,
    CheckpointError,
    check_tensors,
    count_non_finite,
    expected_tensors,
    fingerprint,
    read_vision_tensors,
    shard_range,
)
from tp.spec import PUBLISHED_K3, EncoderSpec

K3 = spec_of("tiny-k3")
WQKV = "vision_tower.encoder.blocks.0.wqkv.weight"
NORM = "vision_tower.encoder.blocks.0.norm0.weight"
TEXT_SHARD, PROJECTOR_SHARD, FIRST_TOWER_SHARD = (f"model-0000{index}-of-000004.safetensors" for index in (1, 2, 3))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of tiny-k3 to break."""
    return Path(shutil.copytree(GOLDEN / "tiny-k3-f32", tmp_path / "model"))


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the first tower shard's tensors, and the index with them."""
    tensors = load_file(folder / FIRST_TOWER_SHARD)
    change(tensors)
    save_file(tensors, folder / FIRST_TOWER_SHARD)
    index = json.loads((folder / INDEX_NAME).read_text())
    kept = {name: file for name, file in index["weight_map"].items() if file != FIRST_TOWER_SHARD}
    index["weight_map"] = kept | dict.fromkeys(tensors, FIRST_TOWER_SHARD)
    (folder / INDEX_NAME).write_text(json.dumps(index))


def check(folder: Path) -> None:
    check_tensors(K3, read_vision_tensors(folder, K3))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_goldens_hold_what_is_expected(model: str, precision: str) -> None:
    table = read_vision_tensors(GOLDEN / f"{model}-{precision}", spec_of(model))
    check_tensors(spec_of(model), table)
    assert sum(math.prod(entry.shape) for entry in table.values()) == MANIFEST["models"][model]["n_params_vision"]


def published(model: str) -> EncoderSpec:
    heads = {"num_layers": 27, "hidden_size": 1152, "qkv_size": 1152, "num_heads": 16, "mlp_size": 4304}
    table = {"pos_emb_height": 64, "pos_emb_width": 64}
    text = 7168 if model == "tiny-k25" else 2048
    return replace(spec_of(model), text_hidden_size=text, **heads, **table)


@pytest.mark.parametrize(
    ("spec", "parameters"),
    [(PUBLISHED_K3, 447_358_976), (published("tiny-k25"), 471_143_920), (published("tiny-kimivl"), 447_545_840)],
)
def test_published_sizes(spec: EncoderSpec, parameters: int) -> None:
    assert sum(map(math.prod, expected_tensors(spec).values())) == parameters


def test_published_k3_has_168_tensors() -> None:
    assert len(expected_tensors(PUBLISHED_K3)) == 168
    assert expected_tensors(PUBLISHED_K3)["mm_projector.proj.2.weight"] == (7168, 4096)


def test_decoys_are_left_out() -> None:
    names = read_vision_tensors(GOLDEN / "tiny-k3-f32", K3)
    assert not [name for name in names if name.startswith("language_model")]


def test_entry_points_at_the_bytes() -> None:
    entry = read_vision_tensors(GOLDEN / "tiny-k3-f32", K3)[WQKV]
    raw = bytearray(entry.file.read_bytes()[entry.start : entry.stop])
    stored = load_file(entry.file)[WQKV]
    assert torch.equal(torch.frombuffer(raw, dtype=torch.float32).view(entry.shape), stored)


def test_missing_tensor_is_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop(WQKV))
    with pytest.raises(CheckpointError, match=rf"{WQKV} is missing, expected \[288, 64\]"):
        check(folder)


def test_tensor_that_only_the_index_has_is_named(folder: Path) -> None:
    tensors = load_file(folder / FIRST_TOWER_SHARD)
    del tensors[WQKV]
    save_file(tensors, folder / FIRST_TOWER_SHARD)
    with pytest.raises(CheckpointError, match=f"{WQKV} is missing"):
        check(folder)


def test_misshapen_tensor_is_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({WQKV: torch.zeros(192, 64)}))
    with pytest.raises(CheckpointError, match=rf"{WQKV} is \[192, 64\], expected \[288, 64\]"):
        check(folder)


def test_left_over_tensor_is_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"vision_tower.extra.bias": torch.zeros(3)}))
    with pytest.raises(CheckpointError, match=r"vision_tower.extra.bias \[3\] is left over"):
        check(folder)


def test_mixed_dtypes_are_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({WQKV: tensors[WQKV].bfloat16()}))
    with pytest.raises(CheckpointError, match=rf"dtypes are mixed: .*F32, .*{WQKV} is BF16|{WQKV} is BF16, .*F32"):
        check(folder)


def test_quantised_tensor_is_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({WQKV: tensors[WQKV].to(torch.uint8)}))
    with pytest.raises(CheckpointError, match=f"{WQKV} is U8, not one of F32, BF16, F16"):
        check(folder)


def test_many_faults_are_counted(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.clear() or tensors.update({"vision_tower.x": torch.zeros(1)}))
    with pytest.raises(CheckpointError, match=r"; and \d+ more$"):
        check(folder)


def test_missing_shard_is_named(folder: Path) -> None:
    (folder / FIRST_TOWER_SHARD).unlink()
    with pytest.raises(CheckpointError, match=f"{FIRST_TOWER_SHARD} is missing"):
        read_vision_tensors(folder, K3)


def test_truncated_shard_is_named_with_its_sizes(folder: Path) -> None:
    path = folder / FIRST_TOWER_SHARD
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(
        CheckpointError, match=rf"{FIRST_TOWER_SHARD} is truncated: .* {size}, the file has {size - 100}"
    ):
        read_vision_tensors(folder, K3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "truncated or no safetensors file: 0 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a git-lfs pointer of 43 bytes"),
        (b"\x05" + bytes(7) + b"{x: 1", "malformed header"),
        (b"\x02" + bytes(7) + b"[]", "malformed header"),
    ],
)
def test_other_content_is_refused(folder: Path, content: bytes, message: str) -> None:
    (folder / FIRST_TOWER_SHARD).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{FIRST_TOWER_SHARD} .*{message}"):
        read_vision_tensors(folder, K3)


def test_header_that_contradicts_itself_is_refused(folder: Path) -> None:
    header = json.dumps({WQKV: {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}).encode()
    (folder / FIRST_TOWER_SHARD).write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(CheckpointError, match=rf"{WQKV} \[2\] F32 does not fill its 4 bytes"):
        read_vision_tensors(folder, K3)


def write_raw(path: Path, header: bytes, num_bytes: int = 16) -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(num_bytes))


def entry(shape: str = "[2, 2]", offsets: str = "[0, 16]", dtype: str = '"F32"') -> str:
    return f'{{"dtype": {dtype}, "shape": {shape}, "data_offsets": {offsets}}}'


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (f'{{"{WQKV}": {entry()}, "{NORM}": {entry()}}}', "invalid offset for tensor"),  # one over the other
        (f'{{"{WQKV}": {entry("[2]", "[8, 16]")}}}', "invalid offset for tensor"),  # a hole before it
        (f'{{"{WQKV}": {entry("[2]", "[0, 8]")}}}', "file not fully covered"),  # bytes that are nobody's
        (f'{{"{WQKV}": {entry("[2.4, 2.4]", "[0, 23.04]")}}}', "truncated: .* ends at byte"),
        (f'{{"{WQKV}": {entry("[2.0, 2.0]")}}}', "invalid type: floating point"),
        (f'{{"{WQKV}": {entry("[2, 2]", "[0.0, 16.0]")}}}', "invalid type: floating point"),
        (f'{{"{WQKV}": {entry(chr(91) + chr(34) + "2" + chr(34) + ", 2]")}}}', "does not fill its 16 bytes"),
        (f'{{"{WQKV}": {entry("[Infinity, 1]")}}}', "does not fill its 16 bytes"),
        (f'{{"{WQKV}": {entry("[-2, -2]")}}}', "invalid value: integer `-2`"),
        (f'{{"{WQKV}": {entry("[4]", "[16, 0]")}}}', "does not fill its -16 bytes"),
        (f'{{"{WQKV}": {entry(dtype="[]")}}}', f"malformed header at {WQKV}"),
        (f'{{"{WQKV}": {entry(dtype=chr(34) + "F99" + chr(34))}}}', "unknown variant `F99`"),
        (f'{{"{WQKV}": {entry("null")}}}', f"malformed header at {WQKV}"),
        (f'{{"{WQKV}": null}}', f"malformed header at {WQKV}"),
        (f'{{"{WQKV}": {entry()}, "{WQKV}": {entry()}}}', f"{WQKV} is there twice"),
        (f'{{"{WQKV}": {entry()[:-1]}, "dtype": "F32"}}}}', "dtype is there twice"),
        ('{"a":' + "[" * 200_000, "maximum recursion depth"),
        (f'{{"{WQKV}": {entry()}, "__metadata__": {{"a": 1}}}}', "expected a string"),
    ],
)
def test_what_the_library_refuses_is_refused(folder: Path, header: str, message: str) -> None:
    write_raw(folder / FIRST_TOWER_SHARD, header.encode())
    with pytest.raises(CheckpointError, match=f"{FIRST_TOWER_SHARD}.*{message}"):
        read_vision_tensors(folder, K3)


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_only_regular_files_are_opened(folder: Path, make: Callable[[Path], object]) -> None:
    (folder / FIRST_TOWER_SHARD).unlink()
    make(folder / FIRST_TOWER_SHARD)
    with pytest.raises(CheckpointError, match=f"{FIRST_TOWER_SHARD} is not a regular file"):
        read_vision_tensors(folder, K3)


def test_names_of_tensors_are_escaped_in_messages(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"vision_tower.\x1b[31m\n": torch.zeros(3)}))
    with pytest.raises(CheckpointError, match=r"vision_tower\.\\x1b\[31m\\n \[3\] is left over"):
        check(folder)


@pytest.mark.parametrize(
    ("dtype", "values", "count"),
    [
        (torch.float32, [1.0, math.nan, -math.inf, 3e38], 2),
        (torch.bfloat16, [1.0, math.nan, -math.inf, 3e38], 2),
        (torch.float16, [1.0, math.nan, 6e4, math.inf], 2),
        (torch.float32, [0.0, -0.0, 1e-45, 1.0], 0),
    ],
)
def test_values_that_are_not_finite_are_counted(
    folder: Path, dtype: torch.dtype, values: list[float], count: int
) -> None:
    rewrite(folder, lambda tensors: tensors.update({NORM: torch.tensor(values, dtype=dtype)}))
    assert count_non_finite(read_vision_tensors(folder, K3)[NORM]) == count


def test_text_shard_may_be_absent_or_garbage(folder: Path) -> None:
    (folder / TEXT_SHARD).write_bytes(b"garbage")
    check(folder)
    (folder / TEXT_SHARD).unlink()
    check(folder)


def test_files_without_vision_tensors_are_never_opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    plain_open = Path.open

    def spy(self: Path, *arguments: object, **options: object) -> object:
        opened.append(self.name)
        return plain_open(self, *arguments, **options)

    monkeypatch.setattr(Path, "open", spy)
    fingerprint(read_vision_tensors(folder, K3))
    assert FIRST_TOWER_SHARD in opened
    assert TEXT_SHARD not in opened


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/hostname", "..", ".", "", "a\x1b", "a\ud800", "a\0"])
def test_index_may_not_leave_the_folder(folder: Path, name: str) -> None:
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": {WQKV: name}}))
    with pytest.raises(CheckpointError, match="not a file of its folder"):
        read_vision_tensors(folder, K3)


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"weight_map": [1]}', '{"weight_map": {"a": null}}', '{"weight_map":' + "[" * 200_000]
)
def test_malformed_index_is_refused(folder: Path, content: str) -> None:
    (folder / INDEX_NAME).write_text(content)
    with pytest.raises(CheckpointError, match="no readable weight_map"):
        read_vision_tensors(folder, K3)


def test_files_without_an_index(folder: Path) -> None:
    (folder / INDEX_NAME).unlink()
    check(folder)


def test_a_single_file(folder: Path, tmp_path: Path) -> None:
    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    (tmp_path / "single").mkdir()
    save_file(tensors, tmp_path / "single" / "model.safetensors")
    check(tmp_path / "single")


def test_a_tensor_in_two_files_is_refused(folder: Path) -> None:
    (folder / INDEX_NAME).unlink()
    shutil.copy(folder / FIRST_TOWER_SHARD, folder / "copy.safetensors")
    with pytest.raises(CheckpointError, match=f"is both in copy.safetensors and in {FIRST_TOWER_SHARD}"):
        read_vision_tensors(folder, K3)


def test_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds neither"):
        read_vision_tensors(tmp_path, K3)


def test_fingerprint_knows_weights_not_places(folder: Path) -> None:
    before = fingerprint(read_vision_tensors(GOLDEN / "tiny-k3-f32", K3))
    (folder / TEXT_SHARD).unlink()
    assert fingerprint(read_vision_tensors(folder, K3)) == before
    rewrite(folder, lambda tensors: tensors[WQKV][-1, -1].add_(1))
    assert fingerprint(read_vision_tensors(folder, K3)) != before


@pytest.mark.parametrize(
    ("total", "unit", "world_size", "expected"),
    [
        (4096, 8, 3, [(0, 1360), (1360, 2728), (2728, 4096)]),
        (4096, 8, 4, [(0, 1024), (1024, 2048), (2048, 3072), (3072, 4096)]),
        (140, 8, 2, [(0, 72), (72, 140)]),  # 17.5 units: the last is cut short
        (1536, 128, 2, [(0, 768), (768, 1536)]),
    ],
)
def test_shard_range(total: int, unit: int, world_size: int, expected: list[tuple[int, int]]) -> None:
    assert [shard_range(total, unit=unit, rank=rank, world_size=world_size) for rank in range(world_size)] == expected
