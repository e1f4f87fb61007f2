"""Whatever a checkpoint folder holds: it is understood, or it is refused with names and numbers before anything starts.

Each case damages a copy of tiny-k3 (f32, four shards: text, projector, tower, tower) and says what must be told.
"""

import contextlib
import fcntl
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from goldens import GOLDEN, spec_of
from running import ROOT
from safetensors.torch import load_file, save_file
from torch import Tensor

from service.cli import check_weights, read_checked_spec
from tp.checkpoint import INDEX_NAME, fingerprint, read_vision_tensors
from tp.parallel import TPGroup
from tp.runner import Runner
from tp.settings import ModelSettings, Settings

SHARDS = [f"model-0000{index}-of-000004.safetensors" for index in range(1, 5)]
TEXT, PROJECTOR, TOWER, LAST = SHARDS
WQKV = "vision_tower.encoder.blocks.0.wqkv.weight"
CONVOLUTION = "vision_tower.patch_embed.proj.weight"
NORM = "vision_tower.encoder.final_layernorm.weight"


@dataclass(frozen=True)
class Broken:
    """A way to damage a folder, and phrases that its message must hold."""

    name: str
    damage: Callable[[Path], object]
    words: tuple[str, ...]


def config(folder: Path, **vision: Any) -> None:
    """Change vision_config; a key that ends in `_top` is of the whole file."""
    path = folder / "config.json"
    values = json.loads(path.read_text())
    for key, value in vision.items():
        part, name = (values, key.removesuffix("_top")) if key.endswith("_top") else (values["vision_config"], key)
        part[name] = value
    path.write_text(json.dumps(values))


def change(folder: Path, edit: Callable[[dict[str, Tensor]], object], shards: tuple[str, ...] = tuple(SHARDS)) -> None:
    """Change tensors of these shards, and the index with them."""
    index = json.loads((folder / INDEX_NAME).read_text())
    for shard in shards:
        tensors = load_file(folder / shard)
        edit(tensors)
        save_file(tensors, folder / shard)
        kept = {name: file for name, file in index["weight_map"].items() if file != shard}
        index["weight_map"] = kept | dict.fromkeys(tensors, shard)
    (folder / INDEX_NAME).write_text(json.dumps(index))


def rename(folder: Path, old: str, new: str) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[name.replace(old, new)] = tensors.pop(name)

    change(folder, edit)


def cast(folder: Path, dtype: torch.dtype) -> None:
    """Every vision tensor, as a program would store it that leaves config.json alone."""
    change(folder, lambda tensors: tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()}))


def cut(path: Path, count: int) -> None:
    path.write_bytes(path.read_bytes()[:-count])


def overlap(folder: Path) -> None:
    """Two norms of one shape, in the same bytes."""
    content = (folder / TOWER).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    first, second = (f"vision_tower.encoder.blocks.0.norm{index}.weight" for index in (0, 1))
    header[first]["data_offsets"] = header[second]["data_offsets"]
    changed = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    (folder / TOWER).write_bytes(content[:8] + changed + content[8 + length :])


def more(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"?")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def pointers(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")


def quantise(tensors: dict[str, Tensor]) -> None:
    if WQKV in tensors:
        weight = tensors.pop(WQKV)
        tensors |= {f"{WQKV}_packed": weight.to(torch.uint8), f"{WQKV}_scale": torch.ones(288)}


def remove(folder: Path, pattern: str) -> None:
    for path in folder.glob(pattern):
        path.unlink()


def drop(folder: Path, tensor: str) -> None:
    change(folder, lambda tensors: tensors.pop(tensor, None))


def add(folder: Path, tensor: str, *shape: int) -> None:
    change(folder, lambda tensors: tensors.update({tensor: torch.zeros(shape)}), (LAST,))


def turn(folder: Path, tensor: str, how: Callable[[Tensor], Tensor]) -> None:
    change(folder, lambda tensors: tensors.update({tensor: how(tensors[tensor])} if tensor in tensors else {}))


def as_float16(folder: Path) -> None:
    cast(folder, torch.float16)
    config(folder, dtype_top="float16")


def below(folder: Path, prefix: str) -> None:
    """Give every vision tensor another name."""
    rename(folder, "vision_tower.", f"{prefix}vision_tower.")
    rename(folder, "mm_projector.", f"{prefix}mm_projector.")


def without_vision(folder: Path) -> None:
    rename(folder, "vision_tower.", "language_model.a.")
    rename(folder, "mm_projector.", "language_model.b.")


BROKEN = [
    Broken("no folder", shutil.rmtree, ("there is no folder",)),
    Broken("no image rule", lambda f: remove(f, "pre*"), ("preprocessor_config.json does not exist",)),
    Broken("config cut short", lambda f: cut(f / "config.json", 9), ("config.json cannot be read",)),
    Broken("text model", lambda f: config(f, vision_config_top=None), ("vision_config is missing",)),
    Broken("endless numbers", lambda f: config(f, projector_ln_eps=math.inf), ("projector_ln_eps must be", "not inf")),
    Broken("endless layers", lambda f: config(f, vt_num_hidden_layers=10**8), ("vt_num_hidden_layers must be an",)),
    Broken("another projector", lambda f: config(f, mm_projector_type="mlp"), ("mm_projector_type is 'mlp'", "v2")),
    Broken("another norm", lambda f: config(f, norm_type="dyt"), ("norm_type is 'dyt'", "layernorm, rmsnorm")),
    Broken("another merge", lambda f: config(f, merge_type="avg"), ("merge_type is 'avg'", "sd2_tpool")),
    Broken("no weights", lambda f: remove(f, "*.safetensors*"), ("holds neither", INDEX_NAME)),
    Broken("index cut short", lambda f: cut(f / INDEX_NAME, 9), (INDEX_NAME, "no readable weight_map")),
    Broken("shard missing", lambda f: remove(f, TOWER), (f"{TOWER} is missing",)),
    Broken("shard cut short", lambda f: cut(f / TOWER, 100), (f"{TOWER} is truncated", "ends at byte", "the file has")),
    Broken("shard without its data", lambda f: (f / TOWER).write_bytes(bytes([64] + [0] * 31)), (TOWER, "32 bytes")),
    Broken("shard and more", lambda f: more(f / TOWER), (TOWER, "file not fully covered")),
    Broken("a tensor on another", overlap, (TOWER, "invalid offset for tensor")),
    Broken("shard is a pipe", lambda f: pipe(f / TOWER), (TOWER, "not a regular file")),
    Broken("index is a pipe", lambda f: pipe(f / INDEX_NAME), (INDEX_NAME, "not a regular file")),
    Broken("config is a pipe", lambda f: pipe(f / "config.json"), ("config.json is not a regular file",)),
    Broken("image rule is a device", lambda f: device(f / "preprocessor_config.json"), ("not a regular file",)),
    Broken("shard empty", lambda f: (f / TOWER).write_bytes(b""), (TOWER, "0 bytes")),
    Broken("pointers of git-lfs", pointers, ("is a git-lfs pointer of", "git lfs pull")),
    Broken("tensor missing", lambda f: drop(f, NORM), (f"{NORM} is missing, expected [64]",)),
    Broken("layer missing", lambda f: config(f, vt_num_hidden_layers=9), ("blocks.4.norm0.weight is missing", "more")),
    Broken("layer left over", lambda f: config(f, vt_num_hidden_layers=1), ("blocks.1", "is left over")),
    Broken("buffer left over", lambda f: add(f, "vision_tower.rope.freqs", 3), ("rope.freqs [3] is left over",)),
    Broken("rotated projector", lambda f: add(f, "mm_projector.rot_proj.weight", 2, 2), ("rot_proj.weight [2, 2] is",)),
    Broken(
        "other shape", lambda f: config(f, vt_intermediate_size=512), ("mlp.fc0.weight is [256, 64], expected [512,",)
    ),
    Broken(
        "channel-last convolution",
        lambda f: turn(f, CONVOLUTION, lambda tensor: tensor.permute(0, 2, 3, 1).contiguous()),
        (f"{CONVOLUTION} is [64, 14, 14, 3], expected [64, 3, 14, 14]",),
    ),
    Broken(
        "quantised tower", lambda f: change(f, quantise), (f"{WQKV} is missing", f"{WQKV}_packed [288, 64] is left")
    ),
    Broken("tower of bytes", lambda f: turn(f, WQKV, Tensor.byte), (f"{WQKV} is U8, not one of F32, BF16, F16",)),
    Broken("mixed dtypes", lambda f: turn(f, WQKV, Tensor.bfloat16), ("dtypes are mixed", f"{WQKV} is BF16")),
    Broken(
        "another dtype than said", lambda f: cast(f, torch.bfloat16), ("are bfloat16, but config.json says float32",)
    ),
    Broken("float16", as_float16, ("the checkpoint is float16", "--dtype")),
    Broken("float16 unsaid", lambda f: cast(f, torch.float16), ("are float16, but config.json says float32",)),
    Broken("float8", lambda f: config(f, dtype_top="float8_e4m3fn"), ("dtype 'float8_e4m3fn' is not one of",)),
    Broken("another layout", lambda f: below(f, "model."), ("holds no", "but model.", "not a published layout")),
    Broken("no vision", without_vision, ("holds no tensor called vision_tower.*", "no tower of a published")),
    Broken(
        "spelt twice", lambda f: add(f, "multi_modal_projector.linear_1.weight", 256, 256), ("mm_projector.proj.0",)
    ),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "tiny-k3-f32", tmp_path / "model"))


def check(folder: Path, dtype: Any = "auto") -> None:
    """What `tpvision serve` does before anything is started."""
    settings = Settings(model=ModelSettings(path=folder, dtype=dtype))
    check_weights(settings, read_checked_spec(settings))


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case.name)
def test_a_broken_folder_is_refused_with_names_and_numbers(folder: Path, case: Broken) -> None:
    case.damage(folder)
    with pytest.raises(ValueError) as caught:
        check(folder)
    for phrase in case.words:
        assert phrase in str(caught.value)


def test_a_start_says_it_on_its_last_line_within_seconds(folder: Path) -> None:
    drop(folder, NORM)
    started = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-m", "service", "serve", "--model", str(folder), "--port", "0", "--device", "cpu"],
        cwd=ROOT,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1] == f"tpvision: {NORM} is missing, expected [64]"
    assert time.monotonic() - started < 20


@contextlib.contextmanager
def hanging(path: Path) -> Iterator[None]:
    """Whoever opens the file waits, as on a mount that is dead: for up to proc's lease-break-time, 45 s by default."""
    with path.open("rb") as file:
        fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)  # one that is ignored, where somebody waits
        try:
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except OSError as error:
            pytest.skip(f"no leases on files here: {error.strerror}")
        yield


@pytest.mark.parametrize("name", ["config.json", INDEX_NAME, TOWER])
def test_a_file_that_hangs_ends_the_start_at_its_limit(folder: Path, name: str) -> None:
    command = [sys.executable, "-m", "service", "serve", "--model", str(folder), "--port", "0", "--device", "cpu"]
    with hanging(folder / name):
        ended = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "TPVISION_PARALLEL__START_TIMEOUT_S": "2"},
            capture_output=True,
            text=True,
            timeout=40,
            check=False,
        )
    assert ended.returncode == 2
    said = f"tpvision: {folder} cannot be read: no answer within 2 s; is its mount alive?"
    assert ended.stderr.splitlines()[-1] == said


def test_a_hub_name_names_the_line_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="`tpvision fetch moonshotai/Kimi-K3 --out models/Kimi-K3`"):
        check(Path("moonshotai/Kimi-K3"))
    with pytest.raises(ValueError, match=r"models/Kimi-K3/config.json does not exist"):
        (tmp_path / "models" / "Kimi-K3").mkdir(parents=True)
        check(Path("models/Kimi-K3"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_cast_is_said_in_one_line(folder: Path, dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    cast(folder, dtype)
    caplog.set_level("INFO", "tpvision")
    check(folder, "bfloat16")
    name = str(dtype).removeprefix("torch.")
    said = [] if name == "bfloat16" else [f"model.dtype casts the checkpoint's weights from {name} to bfloat16"]
    assert [record.message for record in caplog.records] == said


def test_float16_starts_where_the_dtype_is_named(folder: Path) -> None:
    as_float16(folder)
    for dtype in ("bfloat16", "float32", "float16"):
        check(folder, dtype)


def test_quantised_text_weights_are_nobodys_business(folder: Path) -> None:
    text = {
        "language_model.model.layers.0.mlp.experts.0.down_proj.weight_packed": torch.zeros(8, 4, dtype=torch.uint8),
        "language_model.model.layers.0.mlp.experts.0.down_proj.weight_scale": torch.ones(8, dtype=torch.float8_e4m3fn),
        "language_model.model.layers.0.A_log": torch.ones(8, dtype=torch.float64),
    }
    change(folder, lambda tensors: tensors.update(text), (TOWER,))
    check(folder)


def test_a_single_file_with_everything(folder: Path) -> None:
    tensors = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    remove(folder, "*.safetensors*")
    save_file(tensors, folder / "model.safetensors")
    check(folder)


@pytest.mark.parametrize(
    ("model", "other", "linears"),
    [
        ("tiny-k3", "multi_modal_projector", {"proj.0": "linear_1", "proj.2": "linear_2", "post_norm": "post_norm"}),
        ("tiny-kimivl", "mm_projector", {"linear_1": "proj.0", "linear_2": "proj.2", "pre_norm": "pre_norm"}),
    ],
)
def test_either_spelling_of_the_projector_loads_the_same_weights(
    tmp_path: Path, model: str, other: str, linears: dict[str, str]
) -> None:
    folder, spec = Path(shutil.copytree(GOLDEN / f"{model}-f32", tmp_path / "model")), spec_of(model)
    for old, new in linears.items():
        rename(folder, f"{spec.projector_prefix}.{old}", f"{other}.{new}")
    table = read_vision_tensors(folder, spec)
    assert fingerprint(table) == fingerprint(read_vision_tensors(GOLDEN / f"{model}-f32", spec))
    runners = [
        Runner.load(path, spec, dtype="float32", group=TPGroup.single()) for path in (GOLDEN / f"{model}-f32", folder)
    ]
    states = [runner._model.state_dict() for runner in runners]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
