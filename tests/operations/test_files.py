"""What a look at the files of docker/ and deploy/systemd tells, with the operators' own tools where they have one."""

import re
import shutil
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
import yaml
from containers import engine
from packaging.requirements import Requirement
from running import GOLDEN, ROOT
from tools import run, tool

from tp.settings import Settings, load_settings

pytestmark = pytest.mark.operations

DOCKER = ROOT / "docker"
UNIT = ROOT / "deploy" / "systemd" / "tpvision.service"
_EXTRAS = {"", "fetch", "otel", "sglang"}
LISTS = {"frontend": _EXTRAS, "worker-cpu": _EXTRAS | {"worker"}, "worker-cuda": _EXTRAS | {"worker"}}
DRAIN_S = Settings().limits.drain_timeout_s


def pins(path: Path) -> dict[str, str]:
    """Name to version, build tags such as +cpu left out."""
    found = re.findall(r"^([\w.-]+)==([^\s+]+)", path.read_text(), re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}


def packages(extras: set[str]) -> set[str]:
    """What the project needs with these extras, and what that needs in turn; without what torch needs."""
    found: set[tuple[str, str]] = set()
    waiting = {("tpvision", extra) for extra in extras}
    while waiting:
        found |= waiting
        needed = {
            (each.name.lower().replace("_", "-"), extra)
            for name, asked in waiting
            for each in map(Requirement, requires(name) or [])
            if name != "torch"
            and (each.marker is None or each.marker.evaluate({"extra": asked, "python_version": "3.11"}))
            for extra in {"", *each.extras}
        }
        waiting = needed - found
    return {name for name, _ in found} - {"tpvision"}


def test_lists_have_all_that_is_needed_and_nothing_else() -> None:
    frontend, cpu, cuda = (pins(DOCKER / f"requirements-{name}.txt") for name in LISTS)
    assert frontend.keys() == packages(LISTS["frontend"]), "write the lists again: docker/lock.sh"
    assert packages(LISTS["worker-cpu"]) <= cpu.keys() & cuda.keys(), "write the lists again: docker/lock.sh"
    assert frontend.items() <= cpu.items() and cpu.items() <= cuda.items()


@pytest.mark.parametrize("name", LISTS)
def test_a_list_has_what_the_project_needs_in_the_versions_that_it_was_tested_with(name: str) -> None:
    listed, tested = pins(DOCKER / f"requirements-{name}.txt"), pins(ROOT / "constraints.txt")
    assert {package: version for package, version in listed.items() if tested.get(package, version) != version} == {}
    needed = [Requirement(line) for line in requires("tpvision") or []]
    wanted = [
        each for each in needed if each.marker is None or any(each.marker.evaluate({"extra": x}) for x in LISTS[name])
    ]
    missing = [str(each) for each in wanted if not each.specifier.contains(listed.get(each.name, "0"))]
    assert missing == [], "write the lists again: docker/lock.sh"
    assert ("torch" in listed) == (name != "frontend")


@pytest.mark.parametrize("name", [*LISTS, "build"])
def test_every_line_of_a_list_is_hashed_and_names_no_index(name: str) -> None:
    path = DOCKER / f"requirements-{name}.txt"
    text = path.read_text()
    assert len(re.findall(r"==\S+ \\\n +--hash=sha256:[0-9a-f]{64}", text)) == len(pins(path))
    assert "--only-binary :all:" in text and "://" not in text


def test_hadolint_finds_nothing() -> None:
    assert run(tool("hadolint"), DOCKER / "Dockerfile") == ""


def test_the_health_check_asks_the_port_that_the_images_settings_open() -> None:
    settings = load_settings(DOCKER / "tpvision.yaml").settings.server
    asked = re.findall(r"HTTPConnection as C; c = C\('127.0.0.1', (\d+)", (DOCKER / "Dockerfile").read_text())
    assert set(map(int, asked)) == {settings.probe_port}
    assert settings.host == "0.0.0.0"


def test_the_health_check_runs(start_service: Any) -> None:
    (code,) = set(re.findall(r'CMD \["python3", "-IS", "-c", "(.+)"\]', (DOCKER / "Dockerfile").read_text()))
    service = start_service("--model", str(GOLDEN / "tiny-k3-f32"))
    check = [sys.executable, "-IS", "-c", code.replace("8001", service.url.rpartition(":")[2])]
    assert subprocess.run(check, check=False, timeout=30).returncode == 0
    service.stop()
    assert subprocess.run(check, check=False, timeout=30, stderr=subprocess.DEVNULL).returncode == 1


def compose(*files: str) -> Any:
    words = [word for file in files for word in ("--file", f"docker/{file}")]
    return yaml.safe_load(engine("podman-compose", *words, "config", MODEL="Kimi-K3", TP="2"))["services"]


def test_compose_gives_each_container_only_what_it_needs() -> None:
    for service in compose("compose.yaml").values():
        assert service["read_only"] and service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["environment"]["TPVISION_MODEL__PATH"] == "/models/Kimi-K3"
        assert int(service["stop_grace_period"].removesuffix("s")) >= DRAIN_S + 10


def test_the_gpu_overlay_adds_gpus_to_the_worker_alone() -> None:
    plain, overlaid = compose("compose.yaml"), compose("compose.yaml", "compose.gpu.yaml")
    assert overlaid["frontend"] == plain["frontend"]
    (devices,) = overlaid["worker"]["deploy"]["resources"]["reservations"]["devices"]
    assert (devices["driver"], int(devices["count"]), devices["capabilities"]) == ("nvidia", 2, ["gpu"])
    assert overlaid["worker"]["build"]["args"][-1] == "TORCH=cuda"
    assert overlaid["worker"]["environment"]["TPVISION_MODEL__PATH"] == "/models/Kimi-K3"


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    command = shutil.which("tpvision", path=Path(sys.executable).parent)
    assert command is not None
    (tmp_path / UNIT.name).write_text(UNIT.read_text().replace("/opt/tpvision/bin/tpvision", command))
    verify = [tool("systemd-analyze"), "verify", "--man=no", str(tmp_path / UNIT.name)]
    ended = subprocess.run(verify, capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")  # an unknown key is only told of
    run(tool("systemd-analyze"), "security", "--offline=true", "--threshold=20", UNIT)


def test_systemd_waits_for_the_drain() -> None:
    (stop_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", UNIT.read_text(), re.MULTILINE)
    assert int(stop_s) >= DRAIN_S + 10
