"""`tpvision check` on the tiny checkpoints over one and two real ranks, and what it finds where something is wrong."""

import asyncio
import hashlib
import io
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Here
from PIL import Image
from rich.console import Console
from running import COMMAND, GOLDEN, ROOT
from safetensors.torch import load_file, save_file

from service import check
from service.check import Checked, Encoding, check_model, check_picture
from service.host_memory import Available
from service.reference import read_reference, write_reference
from tp.checkpoint import INDEX_NAME
from tp.settings import Settings, load_settings

PICTURE_SHA256 = "e7ba8c78721df45069217c5a50b2be1e8cc6dfb5ebd81f53a5df4d69f7435b4c"  # of its pixels
MODELS = ("tiny-k3-f32", "tiny-k25-bf16", "tiny-kimivl-f32")
TOKENS = np.ones((2, 3), np.float32)
RANK = {"group": 0, "rank": 0, "device": "cpu", "device_free_bytes": None, "attention": "flash attention on CPU"}


@dataclass(frozen=True)
class Ended:
    """A check that a person ran."""

    code: int
    stdout: str
    stderr: str

    @property
    def findings(self) -> dict[str, Any]:
        return {finding["name"]: finding for finding in json.loads(self.stdout)["findings"]}


def tpvision_check(*arguments: str, **environ: str) -> Ended:
    command = [*COMMAND, "check", "--device", "cpu", *arguments]
    environ = {**os.environ, "TPVISION_IMAGE__DECODE_PROCESSES": "1", **environ}
    ended = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=180, check=False)
    return Ended(ended.returncode, ended.stdout, ended.stderr)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("references")


@pytest.fixture(scope="module")
def ended(folder: Path) -> dict[str, tuple[Ended, Ended]]:
    """For each model: checked on one rank, with its reference written, and then on two against that."""

    def both(model: str) -> tuple[Ended, Ended]:
        path, reference = str(GOLDEN / model), str(folder / model)
        one = tpvision_check(path, "--json", "--write-reference", reference)
        return one, tpvision_check(path, "--tp", "2", "--json", "--against", reference)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(MODELS, pool.map(both, MODELS), strict=True))


@pytest.mark.parametrize("model", MODELS)
def test_the_tiny_checkpoints_pass_over_one_rank_and_two(ended: dict[str, tuple[Ended, Ended]], model: str) -> None:
    for world_size, run in enumerate(ended[model], start=1):
        assert run.code == 0, run.stdout + run.stderr
        assert json.loads(run.stdout)["passed"]
        found = run.findings
        assert {finding["status"] for finding in found.values()} == {"ok"}
        assert found["world size"]["values"] == {"world_size": world_size, "legal": [1, 2, 3, 4, 6, 12]}
        assert found["tensors"]["values"]["bytes"] > 0
        assert found["weights"]["text"] == "all finite"
        assert len(found["tensors"]["values"]["fingerprint"]) == 64
        assert found["memory plan"]["values"]["world_size"] == world_size
        assert found[f"encode over {world_size}"]["values"]["shape"][0] == 108
        assert found["attention"]["text"].endswith("(cpu)")
        assert found["memory"]["values"]["available_bytes"] > found["memory"]["values"]["planned_bytes"] > 0
        assert found["/dev/shm"]["values"]["free_bytes"] >= 0
    tolerance = 3e-2 if model.endswith("bf16") else 1e-5
    for name in ("2 ranks = 1 rank", "against"):
        values = found[name]["values"]
        assert values["relative"] <= values["tolerance"] == tolerance


def test_a_reference_says_where_it_came_from(ended: dict[str, tuple[Ended, Ended]], folder: Path) -> None:
    tokens, origin = read_reference(folder / "tiny-k25-bf16")
    assert tokens.shape == (108, 64)
    assert (origin.model_type, origin.dtype, origin.device, origin.world_size) == ("kimi_k25", "bfloat16", "cpu", "1")
    assert origin.fingerprint == ended["tiny-k25-bf16"][0].findings["tensors"]["values"]["fingerprint"]


def test_the_picture_is_the_same_everywhere() -> None:
    image = Image.open(io.BytesIO(check_picture()))
    assert (image.mode, image.size) == ("RGBA", check.PICTURE_SIZE)
    assert hashlib.sha256(image.tobytes()).hexdigest() == PICTURE_SHA256


def test_a_start_that_fails_is_found_with_its_reason() -> None:
    ended = tpvision_check(str(GOLDEN / "tiny-k3-f32"), TPVISION_PARALLEL__START_TIMEOUT_S="0.1")
    assert ended.code == 1
    assert "tpvision check: failed" in ended.stdout and "encode over 1" in ended.stdout
    assert "it was not ready within 0.1 s" in ended.stdout
    assert "Traceback" not in ended.stdout + ended.stderr


# ---- what can be found without starting anything


def settings_of(folder: Path, **flags: Any) -> Settings:
    named = {name.replace("__", "."): value for name, value in flags.items()}
    return load_settings(flags={"model.path": folder, "parallel.device": "cpu", **named}).settings


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Check a folder with ranks that answer `tokens` at once."""

    def run(folder: Path, *, tokens: Any = TOKENS, **options: Any) -> dict[str, Any]:
        async def encode(settings: Settings, spec: Any) -> Encoding:
            return Encoding(tokens, 0.1, [{**RANK}] * settings.parallel.tensor)

        monkeypatch.setattr(check, "_encode", encode)
        flags = {name: options.pop(name) for name in list(options) if "__" in name}
        checked = asyncio.run(check_model(settings_of(folder, **flags), **options))
        assert checked.passed == all(finding.status != "failed" for finding in checked.findings)
        return {finding.name: finding for finding in checked.findings}

    return run


def failed(findings: dict[str, Any]) -> list[str]:
    return [name for name, finding in findings.items() if finding.status == "failed"]


def copy_of(model: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / model, tmp_path / "model"))


def test_a_folder_without_configs_ends_there(found: Any, tmp_path: Path) -> None:
    findings = found(tmp_path)
    assert failed(findings) == ["spec"]
    assert "config.json does not exist" in findings["spec"].text


def test_an_illegal_world_size_is_found_beside_the_rest(found: Any) -> None:
    findings = found(GOLDEN / "tiny-k3-f32", parallel__tensor=5)
    assert failed(findings) == ["world size"]
    assert "memory plan" not in findings
    assert "1, 2, 3, 4, 6, 12" in findings["world size"].text
    assert findings["tensors"].status == "ok"
    assert not any(name.startswith("encode") for name in findings)


def test_a_missing_tensor_is_named_and_nothing_is_started(found: Any, tmp_path: Path) -> None:
    folder = copy_of("tiny-k3-f32", tmp_path)
    shard = folder / "model-00004-of-000004.safetensors"
    tensors = load_file(shard)
    name = next(name for name in sorted(tensors) if name.startswith("vision_tower."))
    del tensors[name]
    save_file(tensors, shard)
    findings = found(folder)
    assert failed(findings) == ["tensors"]
    assert name in findings["tensors"].text
    assert not any(key.startswith("encode") for key in findings)


def test_a_later_model_on_a_known_tower_is_noted(found: Any, tmp_path: Path) -> None:
    folder = copy_of("tiny-k3-f32", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "kimi_k31"}))
    findings = found(folder)
    assert (findings["spec"].status, failed(findings)) == ("note", [])
    assert "kimi_k31" in findings["spec"].text


def test_tokens_that_are_not_finite_fail(found: Any) -> None:
    findings = found(GOLDEN / "tiny-k3-f32", tokens=np.array([[1, np.nan]], np.float32))
    assert failed(findings) == ["encode over 1"]
    assert "NaN" in findings["encode over 1"].text


@pytest.mark.parametrize(
    ("device", "kernel", "status"),
    [
        ("cuda:0", "flash attention, packed images in one call", "ok"),
        ("cuda:0", "memory-efficient attention, one image at a time", "note"),
        ("cpu", "oneDNN products over runs of queries, one image and head at a time", "ok"),
    ],
)
def test_a_gpu_without_flash_attention_is_noted(
    found: Any, monkeypatch: pytest.MonkeyPatch, device: str, kernel: str, status: str
) -> None:
    monkeypatch.setitem(RANK, "device", device)
    monkeypatch.setitem(RANK, "attention", kernel)
    assert found(GOLDEN / "tiny-k3-f32")["attention"].status == status


def test_memory_that_is_short_fails(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "available", lambda: Available(1000, "so they say"))
    assert failed(found(GOLDEN / "tiny-k3-f32")) == ["memory"]


def test_another_installations_embeddings(found: Any, tmp_path: Path) -> None:
    path, model, near = tmp_path / "reference", GOLDEN / "tiny-k3-f32", TOKENS * np.float32(1.001)
    found(model, reference=path)
    assert failed(found(model, against=path)) == []
    assert failed(found(model, tokens=near, against=path)) == ["against"]
    assert failed(found(model, tokens=TOKENS[:1], against=path)) == ["against"]
    findings = found(GOLDEN / "tiny-k25-f32", against=path)
    assert failed(findings) == ["against"]
    assert "other weights" in findings["against"].text
    write_reference(path, TOKENS, replace(read_reference(path)[1], dtype="bfloat16"))
    findings = found(model, tokens=near, against=path)
    assert failed(findings) == []
    assert findings["against"].values["tolerance"] == 3e-2


def test_a_reference_that_cannot_be_written_fails(found: Any, tmp_path: Path) -> None:
    findings = found(GOLDEN / "tiny-k3-f32", reference=tmp_path / "nowhere" / "file")
    assert failed(findings) == ["reference"]
    assert "cannot be written" in findings["reference"].text


def test_a_reference_that_cannot_be_read_is_a_usage_error(here: Here, tmp_path: Path) -> None:
    ended = here("check", str(GOLDEN / "tiny-k3-f32"), "--against", str(tmp_path / "nothing"))
    assert ended.returncode == 2
    assert "cannot be read as a reference" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((str(GOLDEN / "tiny-k3-f32"), "--against", "/nowhere/nope"), "cannot be read as a reference"),
        ((str(GOLDEN / "tiny-k3-f32"), "--config", "/nowhere/nope"), "/nowhere/nope cannot be read"),
        ((str(GOLDEN / "tiny-k3-f32"), "--tp", "0"), "parallel.tensor (flag --tp): Input should be greater than"),
        (("/nowhere/model",), "there is no folder /nowhere/model"),
    ],
)
def test_wrong_usage_is_json_too_where_that_is_asked_for(here: Here, arguments: tuple[str, ...], words: str) -> None:
    ended = here("check", "--json", *arguments, FORCE_COLOR="1")
    assert ended.returncode == 2
    assert words in json.loads(ended.stdout)["error"]
    assert words in ended.stderr.splitlines()[-1]


def strict(text: str) -> Any:
    """JSON that any program reads: Python's own also takes NaN and Infinity."""

    def refuse(name: str) -> None:
        pytest.fail(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("tokens", [TOKENS * np.float32(0), TOKENS * np.float32("nan"), TOKENS * np.float32("inf")])
def test_the_json_is_json_whatever_the_ranks_answer(
    here: Here, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tokens: Any
) -> None:
    async def encode(settings: Settings, spec: Any) -> Encoding:
        return Encoding(tokens, 0.1, [{**RANK}] * settings.parallel.tensor)

    monkeypatch.setattr(check, "_encode", encode)
    arguments = ("check", str(GOLDEN / "tiny-k3-f32"), "--tp", "2", "--json", "--write-reference", str(tmp_path / "r"))
    ended = here(*arguments, FORCE_COLOR="1")
    assert strict(ended.stdout)["passed"] == bool(np.isfinite(tokens).all())


def test_a_name_that_cannot_be_printed_is_printed(here: Here, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(GOLDEN / "tiny-k3-f32", tmp_path / "m\udc80\x1b"))
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": {"vision_tower.a": "a\ud800"}}))
    for arguments in ((), ("--json",)):
        ended = here("check", str(folder), *arguments)
        assert ended.returncode == 1
        assert "which is not a file of its folder" in ended.stdout.replace("\n", " ")
        assert "\x1b" not in ended.stdout


def test_weights_that_are_not_finite_are_named(found: Any, tmp_path: Path) -> None:
    folder = copy_of("tiny-k3-bf16", tmp_path)
    shard = folder / "model-00004-of-000004.safetensors"
    tensors = load_file(shard)
    name = next(name for name in sorted(tensors) if name.startswith("vision_tower.") and tensors[name].ndim == 2)
    tensors[name][7, :3] = float("nan")
    save_file(tensors, shard)
    findings = found(folder)
    assert failed(findings) == ["weights"]
    assert findings["weights"].text == f"NaN or infinite values in 1 tensor(s), such as {name} with 3"
    assert findings["weights"].values == {"non_finite": {name: 3}}


def test_nothing_found_is_read_as_markup() -> None:
    console = Console(width=80, record=True)
    console.print(check.render(Checked((check.Finding("spec", "failed", "[bold] is left over"),))))
    assert "[bold] is left over" in console.export_text()
