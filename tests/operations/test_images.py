"""The images of docker/Dockerfile, really built and run as a hardened container: start, work, drain, recover.

`pytest -m 'operations and slow' tests/operations/test_images.py` prints sizes and times below its table.
"""

import concurrent.futures
import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest
import safetensors
from containers import IMAGES, TMP, Container, built_images, engine, mounts, podman, project_version, sweep
from make_photograph import PHOTOGRAPH, acceptance_picture
from proxies import free_port
from running import GOLDEN, ROOT, RunningService, descendants, images_of, is_alive, wait_until

pytestmark = [pytest.mark.operations, pytest.mark.slow, pytest.mark.timeout(600)]

GOOD = (GOLDEN / "images" / "rgb_64x48.png").read_bytes()
PICTURE = acceptance_picture(448, 448)
NUM_REQUESTS = 16
LISTS = {"frontend": ["frontend"], "worker": ["frontend", "worker-cpu"], "combined": ["frontend", "worker-cpu"]}
MODEL = ("--volume", f"{GOLDEN}:/models:ro", "--env", "TPVISION_MODEL__PATH=/models/tiny-k3-f32")

Record = Callable[[str, object], None]
Start = Callable[..., Container]


@pytest.fixture(scope="module", autouse=True)
def _images() -> Iterator[None]:
    with built_images():
        yield


@pytest.fixture
def start() -> Iterator[Start]:
    """Start hardened containers that end with the test."""
    started: list[Container] = []

    def start_one(image: str, *arguments: str, options: tuple[str, ...] = ()) -> Container:
        started.append(Container.start(f"tpvision-test-{len(started)}", image, *arguments, options=options))
        return started[-1]

    yield start_one
    for container in started:
        container.remove()


@pytest.fixture
def combined(start: Start, record_property: Record) -> Container:
    """Two ranks of the tiny model, ready."""
    options = (*MODEL, TMP, "--publish", "127.0.0.1::8000", "--env", "TPVISION_PARALLEL__TENSOR=2")
    started = time.monotonic()
    container = start("combined", options=options).wait_ready()
    record_property("combined, start to ready", seconds_since(started))
    return container


def seconds_since(moment: float) -> str:
    return f"{time.monotonic() - moment:.1f} s"


def embeddings(answer: httpx.Response) -> npt.NDArray[np.float32]:
    images_of(answer)
    (tensor,) = (each for name, each in safetensors.deserialize(answer.content) if name == "embeddings")
    return np.frombuffer(tensor["data"], np.float32).reshape(tensor["shape"])


def output_of(image: str, *command: str) -> str:
    """What a command prints in a hardened container of the image."""
    program, *arguments = command
    return podman("run", "--rm", "--network=none", "--entrypoint", program, IMAGES[image], *arguments)


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_says_what_it_is(image: str, record_property: Record) -> None:
    (inspected,) = json.loads(podman("image", "inspect", IMAGES[image]))
    record_property(f"{image}, size", f"{inspected['Size'] / 1e6:.0f} MB")
    config = inspected["Config"]
    user, group = map(int, config["User"].split(":"))
    assert user >= 10_000 and group >= 10_000
    assert config["Entrypoint"] == ["/usr/bin/tini", "--", "tpvision"]
    assert ("Healthcheck" in inspected) == (image != "worker")
    labels = {name.removeprefix("org.opencontainers.image."): value for name, value in config["Labels"].items()}
    assert (labels["title"], labels["version"], labels["licenses"]) == ("tpvision", project_version(), "Apache-2.0")
    assert {"description", "revision", "created"} <= labels.keys()


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_holds_what_its_lists_say_and_nothing_to_build_with(image: str) -> None:
    bill = json.loads(output_of(image, "cat", "/opt/tpvision/sbom.cdx.json"))
    found = {(part["name"].lower().replace("_", "-"), part["version"]) for part in bill["components"]}
    listed = {
        (name.lower().replace("_", "-"), version)
        for of in LISTS[image]
        for name, version in re.findall(
            r"^([\w.-]+)==(\S+)", (ROOT / "docker" / f"requirements-{of}.txt").read_text(), re.MULTILINE
        )
    }
    assert found - {("tpvision", project_version())} == listed
    assert bill["bomFormat"] == "CycloneDX"
    code = "import shutil; print(*filter(shutil.which, ['curl', 'wget', 'gcc', 'pip', 'pip3', 'tini', 'tpvision']))"
    assert output_of(image, "python3", "-c", code) == "tini tpvision"


def test_the_front_end_has_no_torch_and_the_worker_has() -> None:
    code = "import importlib.util; print(importlib.util.find_spec('torch') is not None)"
    found = {image: output_of(image, "/opt/tpvision/bin/python", "-c", code) for image in IMAGES}
    assert found == {"frontend": "False", "worker": "True", "combined": "True"}


def test_the_combined_image_encodes_as_the_same_code_outside_does(combined: Container, start_service: Any) -> None:
    assert combined.is_healthy()
    answer = combined.encode(PHOTOGRAPH.read_bytes())
    assert images_of(answer)[0]["original_size"] == [1280, 960]
    outside: RunningService = start_service("--model", str(GOLDEN / "tiny-k3-f32"), "--tp", "2")
    expected = embeddings(outside.encode(PHOTOGRAPH.read_bytes()))
    np.testing.assert_allclose(embeddings(answer), expected, atol=1e-4)
    with pytest.raises(AssertionError, match="Read-only file system"):
        podman("exec", combined.name, "touch", "/opt/tpvision/new")


@contextlib.contextmanager
def accepted(container: Container, rank: int) -> Iterator[None]:
    """Within it requests are accepted and none is answered, as a rank is stopped; after it all must be answered."""
    with concurrent.futures.ThreadPoolExecutor(NUM_REQUESTS) as pool:
        os.kill(rank, signal.SIGSTOP)
        try:
            answers = [pool.submit(container.encode, PICTURE) for _ in range(NUM_REQUESTS)]
            wait_until(lambda: container.capacity()["requests"]["accepted"] == NUM_REQUESTS, timeout_s=25)
            yield
        finally:
            os.kill(rank, signal.SIGCONT)
        assert [answer.result().status_code for answer in answers] == [200] * NUM_REQUESTS


def test_sigterm_under_load_finishes_what_was_accepted(combined: Container, record_property: Record) -> None:
    below = descendants(combined.pid)
    with accepted(combined, combined.ranks[1]):
        started = time.monotonic()
        combined.kill(signal.SIGTERM)
        wait_until(lambda: not combined.is_ready())
    record_property(f"combined, SIGTERM to the last of {NUM_REQUESTS} answers", seconds_since(started))
    assert combined.wait() == 0
    record_property("combined, SIGTERM under that load to exit 0", seconds_since(started))
    assert not any(is_alive(pid) for pid in below)


def test_an_idle_container_ends_soon_after_sigterm(combined: Container, record_property: Record) -> None:
    started = time.monotonic()
    combined.kill(signal.SIGTERM)
    assert combined.wait() == 0
    record_property("combined, SIGTERM when idle to exit 0", seconds_since(started))


def test_a_killed_rank_comes_back(combined: Container, record_property: Record) -> None:
    ranks = combined.ranks
    started = time.monotonic()
    os.kill(ranks[1], signal.SIGKILL)
    wait_until(lambda: not combined.is_ready())
    combined.wait_ready()
    record_property("combined, killed rank to ready", seconds_since(started))
    assert combined.is_healthy()
    assert combined.encode(GOOD).status_code == 200
    assert len(combined.ranks) == 2 and not set(ranks) & set(combined.ranks)


def test_a_front_end_without_a_worker_is_alive_and_not_healthy(start: Start) -> None:
    options = (*MODEL, TMP, "--volume=/run/tpvision", "--publish", "127.0.0.1::8000")
    container = start("frontend", options=options).wait_for("/livez")
    assert not container.is_ready() and not container.is_healthy()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ((TMP,), "model.path is not set"),
        ((*MODEL, TMP, "--tmpfs=/run/tpvision:mode=0700"), "cannot listen on the control socket"),
        (MODEL, "no folder for temporary files"),
    ],
)
def test_a_container_that_cannot_start_says_why_on_its_last_line(
    start: Start, options: tuple[str, ...], reason: str
) -> None:
    container = start("frontend", options=options)
    assert container.wait() == 2
    assert reason in container.log().splitlines()[-1]


class Composed:
    """docker/compose.yaml as it is, run by podman-compose."""

    def __init__(self) -> None:
        self.environ = {"MODELS": str(GOLDEN), "MODEL": "tiny-k3-f32", "TP": "2", "TAG": "test"}
        self.environ["PORT"] = str(free_port())
        self.frontend, self.worker = (Container(f"tpvision_{name}_1") for name in ("frontend", "worker"))

    def run(self, *arguments: str) -> None:
        engine("podman-compose", "--file", "docker/compose.yaml", *arguments, timeout_s=200, **self.environ)

    def stop(self) -> None:
        for container in (self.frontend, self.worker):
            container.remove()
        self.run("down", "--volumes")


@pytest.fixture
def composed(record_property: Record) -> Iterator[Composed]:
    composed = Composed()
    try:
        started = time.monotonic()
        composed.run("up", "--detach", "--no-build")
        composed.frontend.wait_ready()
        record_property("composed, `up` to ready", seconds_since(started))
        yield composed
    finally:
        composed.stop()


def test_front_end_and_worker_share_nothing_but_a_folder_and_outlive_each_other(composed: Composed) -> None:
    frontend, worker = composed.frontend, composed.worker
    assert worker.inspect(".HostConfig.NetworkMode") == "none"
    for container in (frontend, worker):
        assert container.inspect(".HostConfig.ReadonlyRootfs")
        assert container.inspect(".EffectiveCaps") is None
    assert images_of(frontend.encode(PHOTOGRAPH.read_bytes()))[0]["original_size"] == [1280, 960]
    os.kill(worker.ranks[0], signal.SIGKILL)
    wait_until(lambda: not frontend.is_ready())
    assert frontend.wait_ready().encode(GOOD).status_code == 200
    os.kill(frontend.pid, signal.SIGKILL)  # and the worker finds the next one
    wait_until(lambda: not frontend.is_ready())
    assert frontend.wait_ready().encode(GOOD).status_code == 200


def test_both_told_to_stop_at_once_finish_what_was_accepted(composed: Composed, record_property: Record) -> None:
    frontend, worker = composed.frontend, composed.worker
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with accepted(frontend, worker.ranks[1]):
            started = time.monotonic()
            stopped = pool.submit(podman, "stop", "--time", "80", frontend.name, worker.name)
            wait_until(lambda: not frontend.is_ready())
        stopped.result()
    record_property(f"composed, SIGTERM with {NUM_REQUESTS} accepted to the end of both", seconds_since(started))
    assert (frontend.inspect(".State.ExitCode"), worker.inspect(".State.ExitCode")) == (0, 0)


def test_a_sweep_ends_and_unmounts_what_a_killed_run_left(start: Start) -> None:
    container = start("frontend", options=(*MODEL, TMP))
    pid = container.pid
    engine("buildah", "mount", engine("buildah", "from", IMAGES["frontend"]))
    assert mounts()
    sweep()
    assert not mounts() and not is_alive(pid)
