import json
import os
import resource
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from running import GOLDEN
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import service.extract
from service.demo_model import write_demo_model
from service.extract import PROVENANCE_NAME, ExtractError, Slim, check_space, extract
from tp.checkpoint import TOWER_PREFIX, CheckpointError, check_tensors, fingerprint, read_vision_tensors
from tp.spec import read_spec

MODEL = GOLDEN / "tiny-k3-bf16"
SLIM_NAMES = ["config.json", "model.safetensors", "preprocessor_config.json", PROVENANCE_NAME]


def vision_tensors(folder: Path) -> dict[str, torch.Tensor]:
    prefixes = (TOWER_PREFIX, f"{read_spec(folder).projector_prefix}.")
    tensors = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    return {name: tensor for name, tensor in tensors.items() if name.startswith(prefixes)}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("source", sorted(GOLDEN.glob("tiny-*")), ids=lambda path: path.name)
def test_a_slim_folder_holds_the_vision_tensors_and_no_other(source: Path, tmp_path: Path) -> None:
    slim = extract(source, tmp_path / "out")
    expected, found = vision_tensors(source), load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert all(found[name].dtype == expected[name].dtype for name in expected)
    assert names(tmp_path / "out") == SLIM_NAMES
    assert slim.num_tensors == len(expected)
    assert slim.is_new


def test_the_fingerprint_is_the_sources(tmp_path: Path) -> None:
    slim = extract(MODEL, tmp_path / "out")
    spec = read_spec(tmp_path / "out")
    table = read_vision_tensors(tmp_path / "out", spec)
    check_tensors(spec, table)
    assert fingerprint(table) == fingerprint(read_vision_tensors(MODEL, spec)) == slim.provenance.fingerprint


def test_config_files_are_unchanged(tmp_path: Path) -> None:
    extract(MODEL, tmp_path / "out")
    for name in ("config.json", "preprocessor_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (MODEL / name).read_bytes()


def test_the_file_is_as_other_programs_want_it(tmp_path: Path) -> None:
    extract(MODEL, tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_again_changes_nothing(tmp_path: Path) -> None:
    extract(MODEL, tmp_path / "out")
    before = [(path.name, path.stat().st_mtime_ns, path.stat().st_ino) for path in (tmp_path / "out").iterdir()]
    assert not extract(MODEL, tmp_path / "out").is_new
    assert [(path.name, path.stat().st_mtime_ns, path.stat().st_ino) for path in (tmp_path / "out").iterdir()] == before


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"?")])
def test_a_damaged_folder_is_repaired(tmp_path: Path, name: str, damage: Any) -> None:
    extract(MODEL, tmp_path / "out")
    damage(tmp_path / "out" / name)
    assert extract(MODEL, tmp_path / "out").is_new
    assert not extract(MODEL, tmp_path / "out").is_new


def test_a_foreign_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ExtractError, match="is not empty and not written by tpvision"):
        extract(MODEL, tmp_path)
    assert names(tmp_path) == ["thesis.txt"]


def test_the_source_is_never_written_to() -> None:
    with pytest.raises(ExtractError, match="is not empty"):
        extract(MODEL, MODEL)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(ExtractError, match="out is not a folder"):
        extract(MODEL, tmp_path / "out")


def test_a_fresh_volume_is_empty(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    assert extract(MODEL, tmp_path).is_new


def test_other_weights_are_not_replaced(tmp_path: Path) -> None:
    extract(MODEL, tmp_path / "out")
    with pytest.raises(ExtractError, match=r"out holds weights [0-9a-f]{12}, which is not what .*tiny-k3-f32 holds"):
        extract(GOLDEN / "tiny-k3-f32", tmp_path / "out")


def change_in_the_middle(folder: Path) -> None:
    """NaN where no fingerprint looks: it reads 4 KiB at each end of a tensor."""
    spec = read_spec(folder)
    entry = read_vision_tensors(folder, spec)["vision_tower.encoder.blocks.0.wqkv.weight"]
    content = bytearray(entry.file.read_bytes())
    content[entry.start + 8000 : entry.start + 8002] = b"\xc0\x7f"
    entry.file.write_bytes(content)


def test_weights_that_differ_in_the_middle_are_not_replaced(tmp_path: Path) -> None:
    source = Path(shutil.copytree(MODEL, tmp_path / "source"))
    change_in_the_middle(source)
    broken = extract(source, tmp_path / "out")
    assert broken.provenance.fingerprint == extract(MODEL, tmp_path / "good").provenance.fingerprint
    with pytest.raises(ExtractError, match=r"out holds weights [0-9a-f]{12}, which is not what .*tiny-k3-bf16 holds"):
        extract(MODEL, tmp_path / "out")
    assert not extract(source, tmp_path / "out").is_new


def test_another_configuration_is_not_replaced(tmp_path: Path) -> None:
    source = Path(shutil.copytree(MODEL, tmp_path / "source"))
    extract(source, tmp_path / "out")
    config = json.loads((source / "config.json").read_text())
    config["vision_config"]["projector_ln_eps"] = 1e-6
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(ExtractError, match="name another folder"):
        extract(source, tmp_path / "out")


def test_a_run_cut_short_leaves_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        extract(MODEL, tmp_path / "out", report=stop)
    assert names(tmp_path / "out") == []
    assert extract(MODEL, tmp_path / "out").is_new


def test_what_a_killed_run_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".tpvision-partial-abc").mkdir()
    (tmp_path / ".tpvision-partial-abc" / "model.safetensors").write_bytes(b"half")
    assert extract(MODEL, tmp_path).is_new
    assert names(tmp_path) == SLIM_NAMES


def test_a_run_killed_between_renames_can_be_repeated(tmp_path: Path) -> None:
    extract(MODEL, tmp_path)
    for name in ("model.safetensors", "config.json", "preprocessor_config.json"):
        (tmp_path / name).unlink()  # the provenance comes first
    assert extract(MODEL, tmp_path).is_new
    assert names(tmp_path) == SLIM_NAMES


def test_what_was_written_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lying_blocks(entry: Any) -> Any:
        yield bytes(entry.num_bytes)

    monkeypatch.setattr(service.extract, "_blocks", lying_blocks)
    with pytest.raises(ExtractError, match=r"the weights written have fingerprint \w+, those read \w+"):
        extract(MODEL, tmp_path / "out")
    assert names(tmp_path / "out") == []


def test_a_byte_that_the_disk_changes_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: os.pwrite(descriptor, b"?", os.fstat(descriptor).st_size // 2))
    with pytest.raises(ExtractError, match=r"what was read back in .* is not what was written"):
        extract(MODEL, tmp_path / "out")
    assert names(tmp_path / "out") == []


def test_a_disk_that_fails_is_named_with_the_step(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(ExtractError, match=r"writing .*out: File too large"):
            extract(MODEL, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with pytest.raises(ExtractError, match=r"writing /proc/no/such: /proc/no: No such file"):
        extract(MODEL, Path("/proc/no/such"))
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ExtractError, match="link is not a folder"):
        extract(MODEL, tmp_path / "link")


@pytest.mark.parametrize(
    "damage",
    [os.mkfifo, lambda path: path.write_text("[" * 200_000), lambda path: path.write_text('{"source_files": [1]}')],
)
def test_a_provenance_that_cannot_be_read_is_named(tmp_path: Path, damage: Any) -> None:
    damage(tmp_path / PROVENANCE_NAME)
    with pytest.raises(ExtractError, match=f"{PROVENANCE_NAME} is not readable"):
        extract(MODEL, tmp_path)


def test_a_source_that_is_not_whole_writes_nothing(tmp_path: Path) -> None:
    source = Path(shutil.copytree(MODEL, tmp_path / "source"))
    (source / "model-00003-of-000004.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00003-of-000004.safetensors is missing"):
        extract(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_small_disk_is_named_with_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(ExtractError, match=r"1,000,000,000,000,000,000 bytes are needed below .*, and [\d,]+ are free"):
        check_space(tmp_path / "not" / "there", 10**18)


def test_memory_stays_low(tmp_path: Path) -> None:
    write_demo_model(tmp_path / "demo", size="tiny")
    config = json.loads((tmp_path / "demo" / "config.json").read_text())
    config["vision_config"]["init_pos_emb_height"] = 2048  # one tensor of 32 MiB
    (tmp_path / "demo" / "config.json").write_text(json.dumps(config))
    (shard,) = (tmp_path / "demo").glob("model-00003*")
    tensors = load_file(shard) | {"vision_tower.patch_embed.pos_emb.weight": torch.zeros(2048, 64, 64)}
    save_file(tensors, shard)
    del tensors
    tracemalloc.start()
    slim = extract(tmp_path / "demo", tmp_path / "out")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert slim.num_bytes > 32 << 20
    assert peak < 6 << 20


def test_two_writers_of_one_folder_take_turns(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def write(_: int) -> Slim:
        return extract(MODEL, tmp_path / "out")

    with ThreadPoolExecutor(4) as pool:
        slims = list(pool.map(write, range(4)))
    assert sorted(slim.is_new for slim in slims) == [False, False, False, True]
