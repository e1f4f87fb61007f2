"""The images, really built without a daemon, and hardened containers of them.

The base is a minimal Debian in the place of Docker's; wheels are downloaded outside and the build has no index. All of
it is kept in .operations/containers, so that only the first build takes minutes.
"""

import contextlib
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from running import ROOT, ranks_below
from tools import FOLDER, tool

IMAGES = {  # target: name
    "frontend": "localhost/tpvision-frontend:test",
    "worker": "localhost/tpvision-worker:test",
    "combined": "localhost/tpvision:test",
}
STORE = FOLDER / "containers"
READY_S = 120
HARDENED = (
    *("--read-only", "--read-only-tmpfs=false", "--cap-drop=ALL", "--security-opt=no-new-privileges"),
    *("--pids-limit=512", "--memory=4g"),
    "--health-interval=disable",  # podman schedules health checks with systemd; the tests run them by hand
)
TMP = "--tmpfs=/tmp:mode=1777"
_BASE = "localhost/debian:bookworm-slim"
_NOT_IN_THE_BASE = ("/usr/share/man/*", "/usr/share/doc/*", "/usr/share/locale/*")
_CONTAINERS_CONF = """
[containers]
default_ulimits = ["nofile=16384:16384", "nproc=8192:8192"]  # root of a sandbox may not raise its own
cgroupns = "host"
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
"""
_STORAGE_CONF = """
[storage]
driver = "overlay"
graphroot = "{store}/storage"
runroot = "{store}/run"
"""


_CONFIGURED = {"": "containers", "STORAGE_": "storage"}
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def engine(program: str, *arguments: str, timeout_s: float = 120, **more: str) -> str:
    """What podman, buildah or podman-compose prints, with a storage and a configuration of our own."""
    STORE.mkdir(parents=True, exist_ok=True)
    (STORE / "containers.conf").write_text(_CONTAINERS_CONF)
    (STORE / "storage.conf").write_text(_STORAGE_CONF.format(store=STORE))
    own = {f"CONTAINERS_{kind}CONF": str(STORE / f"{name}.conf") for kind, name in _CONFIGURED.items()}
    ended = subprocess.run(
        [tool(program), *arguments],
        env={**os.environ, **own, **more},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert ended.returncode == 0, f"{program} {' '.join(arguments)}:\n{ended.stdout}{ended.stderr}"
    return ended.stdout.strip()


def podman(*arguments: str, timeout_s: float = 120) -> str:
    return engine("podman", *arguments, timeout_s=timeout_s)


@contextlib.contextmanager
def built_images() -> Iterator[None]:
    """All targets; at the end nothing runs or is mounted any more. Skips the test where they cannot be built."""
    for program in ("podman", "buildah", "runc", "mmdebstrap"):
        tool(program)
    if os.getuid() != 0 or (sys.version_info[:2], platform.machine()) != ((3, 11), "x86_64"):
        pytest.skip("images are built as root, with the wheels of Debian 12's Python 3.11 on x86_64")
    sweep()  # after a run that was killed
    try:
        _build_images()
        yield
    finally:
        sweep()


def sweep() -> None:
    """Ends and unmounts all that podman and buildah hold in our storage; images stay."""
    podman("rm", "--all", "--force", "--volumes", "--time", "0")
    engine("buildah", "rm", "--all")
    for point in reversed(mounts()):
        engine("umount", "--lazy", point)


def mounts() -> list[str]:
    """What is mounted in our storage, in the order in which it was."""
    points = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    return [point for point in points if Path(point).is_relative_to(STORE)]


def _build_images() -> None:
    """On CPU wheels; what is cached is not built again."""
    if _BASE not in podman("images", "--format", "{{.Repository}}:{{.Tag}}").split():
        _make_base()
    _download_wheels()
    for target, image in IMAGES.items():
        _build(target, image)


def _build(target: str, image: str) -> None:
    arguments = {"BASE": _BASE, "TORCH": "cpu", "PIP_OPTIONS": "--no-index", "VERSION": project_version()}
    engine(
        *("buildah", "bud", "--isolation", "chroot", "--format", "docker", "--layers"),
        *(word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")),
        *("--build-context", f"wheels={STORE / 'wheels'}", "--file", "docker/Dockerfile"),
        *("--target", target, "--tag", image, "."),
        timeout_s=900,
    )


def _make_base() -> None:
    """What debian:bookworm-slim is: apt and what is essential, without documentation."""
    archive = STORE / "base.tar"
    excludes = [f"--dpkgopt=path-exclude={path}" for path in _NOT_IN_THE_BASE]
    merged = ("--include=usr-is-merged", "--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr")
    engine("mmdebstrap", "--variant=apt", *merged, *excludes, "bookworm", str(archive), timeout_s=300)
    container = engine("buildah", "from", "scratch")
    engine("buildah", "add", "--quiet", container, str(archive), "/")
    engine("buildah", "config", "--env", f"PATH={_PATH}", container)
    engine("buildah", "commit", "--quiet", "--rm", container, _BASE)
    archive.unlink()


def _download_wheels() -> None:
    """Every wheel of the lists, checked against its hash; again whenever a list changes."""
    lists = [ROOT / "docker" / f"requirements-{name}.txt" for name in ("build", "worker-cpu")]
    stamp = STORE / "wheels" / hashlib.sha256(b"".join(path.read_bytes() for path in lists)).hexdigest()
    if stamp.exists():
        return
    shutil.rmtree(STORE / "wheels", ignore_errors=True)
    for path in lists:
        command = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes")
        subprocess.run([*command, "--dest", STORE / "wheels", "--requirement", path], check=True, timeout=600)
    stamp.touch()


def project_version() -> str:
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


class Container:
    """One container that publishes port 8000, or none; started here, or by compose."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.client = httpx.Client(timeout=120, trust_env=False)

    @classmethod
    def start(cls, name: str, image: str, *arguments: str, options: tuple[str, ...] = ()) -> "Container":
        podman("rm", "--force", "--ignore", name)
        podman("run", "--detach", "--name", name, *HARDENED, *options, IMAGES[image], *arguments)
        return cls(name)

    @property
    def pid(self) -> int:
        """Its first process's, as the machine sees it."""
        return int(self.inspect(".State.Pid"))

    @property
    def ranks(self) -> list[int]:
        return ranks_below(self.pid)

    def inspect(self, path: str) -> Any:
        return json.loads(podman("container", "inspect", "--format", "{{json " + path + "}}", self.name))

    def wait_ready(self) -> "Container":
        return self.wait_for("/readyz")

    def wait_for(self, probe: str) -> "Container":
        if not self.client.base_url.host:  # one that is being restarted publishes nothing, and then the same again
            self.client.base_url = httpx.URL("http://" + podman("port", self.name, "8000").splitlines()[0])
        deadline = time.monotonic() + READY_S
        while not self.answers(probe):
            assert time.monotonic() < deadline, f"{self.name} does not answer {probe}:\n{self.log()}"
            time.sleep(0.05)
        return self

    def is_ready(self) -> bool:
        return self.answers("/readyz")

    def answers(self, probe: str) -> bool:
        try:
            return self.client.get(probe).status_code == 200
        except httpx.TransportError:
            return False

    def is_healthy(self) -> bool:
        """What its HEALTHCHECK says now."""
        command = self.inspect(".Config.Healthcheck.Test")[1:]
        try:
            podman("exec", self.name, *command)
        except AssertionError:
            return False
        return True

    def encode(self, content: bytes) -> httpx.Response:
        return self.client.post("/v1/encode", content=content)

    def capacity(self) -> Any:
        return self.client.get("/v1/capacity").json()

    def kill(self, number: signal.Signals) -> None:
        podman("kill", "--signal", number.name, self.name)

    def wait(self) -> int:
        """Its exit status, when it has ended."""
        return int(podman("wait", self.name))

    def log(self) -> str:
        return engine("sh", "-c", f"podman logs {self.name} 2>&1")

    def remove(self) -> None:
        self.client.close()
        podman("rm", "--force", "--ignore", "--volumes", "--time", "0", self.name)
