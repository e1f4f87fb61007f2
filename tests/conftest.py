"""Shared fixtures: golden data, and real services with real worker groups on loopback."""

import json
import signal
import sys
from collections.abc import Callable, Iterator
from subprocess import CompletedProcess
from typing import Any

import pytest
from running import GOLDEN, REFERENCE_IMAGES, RunningService

from service.cli import main

Start = Callable[..., RunningService]
Here = Callable[..., CompletedProcess[str]]


def pytest_configure() -> None:
    """A run that is told to end is interrupted: its fixtures end the processes that they started.

    Those hear a hangup, also where this run was started by `nohup`.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_unconfigure() -> None:
    """End what tests that failed have left: the run would wait for its log."""
    for service in RunningService.started:
        service.stop(signal.SIGKILL)


@pytest.fixture
def here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> Iterator[Here]:
    """Run a `tpvision` command in this process, which takes no second to start; its log is in its stderr."""
    before = signal.getsignal(signal.SIGTERM)

    def run(*arguments: str, **environ: str) -> CompletedProcess[str]:
        capsys.readouterr()
        caplog.clear()
        with monkeypatch.context() as patch, caplog.at_level("INFO"), pytest.raises(SystemExit) as ended:
            patch.setattr(sys, "argv", ["tpvision", *arguments])
            for name, value in environ.items():
                patch.setenv(name, value)
            main()
        stdout, stderr = capsys.readouterr()
        return CompletedProcess(arguments, int(ended.value.code or 0), stdout, caplog.text + stderr)

    yield run
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    """The golden manifest."""
    return json.loads((GOLDEN / "manifest.json").read_text())  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def start_service() -> Iterator[Start]:
    """Start services that end with the module."""
    started: list[RunningService] = []

    def start(*arguments: str, **environ: str) -> RunningService:
        service = RunningService(list(arguments), environ)
        started.append(service)
        return service.wait_ready()

    yield start
    for service in started:
        service.stop()


@pytest.fixture(scope="session")
def tiny_k3() -> Iterator[RunningService]:
    """Two ranks on tiny-k3 in float32, with the reference's image processing."""
    arguments = ["--model", str(GOLDEN / "tiny-k3-f32"), "--tp", "2"]
    service = RunningService(arguments, REFERENCE_IMAGES).wait_ready()
    yield service
    assert service.stop() == 0


@pytest.fixture(scope="session")
def tiny_k3_bf16() -> Iterator[RunningService]:
    """Two ranks on tiny-k3 in bfloat16, with the reference's image processing."""
    arguments = ["--model", str(GOLDEN / "tiny-k3-bf16"), "--tp", "2"]
    service = RunningService(arguments, REFERENCE_IMAGES).wait_ready()
    yield service
    assert service.stop() == 0
