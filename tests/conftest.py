"""Shared fixtures: golden data, and real services with real worker groups on loopback."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from running import GOLDEN, REFERENCE_IMAGES, RunningService

Start = Callable[..., RunningService]


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
