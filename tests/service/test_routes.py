"""What every request passes through: nothing of it is called in a thread, and an answer leaves in few pieces."""

import asyncio
import inspect
from collections.abc import Sequence
from typing import Any

import pytest
from fastapi import APIRouter
from fastapi.routing import APIRoute

from service.handoff.routes import sglang_router, vllm_router
from service.routes import PartsResponse, check_key, router
from service.schemas import Answer


@pytest.mark.parametrize("routes", [router, vllm_router, sglang_router])
def test_no_request_is_handed_to_a_thread(routes: APIRouter) -> None:
    """FastAPI calls every handler and dependency that is not a coroutine in one."""
    handlers = [route.endpoint for route in routes.routes if isinstance(route, APIRoute)]
    dependencies = [each.dependency for each in routes.dependencies]
    assert handlers and check_key in dependencies
    assert all(inspect.iscoroutinefunction(call) for call in [*handlers, *dependencies])


def sent(parts: Sequence[bytes]) -> list[dict[str, Any]]:
    """The ASGI messages of an answer, and that it said once that it had ended."""
    messages: list[dict[str, Any]] = []
    ends: list[int] = []

    async def send(message: Any) -> None:
        messages.append(dict(message))

    async def receive() -> Any:
        raise AssertionError("an answer reads nothing")

    response = PartsResponse(Answer(parts, "application/octet-stream", {}), {}, lambda: ends.append(len(messages)))
    asyncio.run(response({"type": "http"}, receive, send))
    assert ends == [len(messages)]
    return messages


@pytest.mark.parametrize(
    ("parts", "pieces"),
    [
        ([b"head", bytes(1000), b"tail"], [b"head" + bytes(1000) + b"tail"]),
        ([b"head", bytes(2**16), b"tail"], [b"head", bytes(2**16), b"tail", b""]),
        ([bytes(2**17)], [bytes(2**17), b""]),  # sending the last one waits for the rest
    ],
)
def test_only_a_large_answer_leaves_in_pieces(parts: list[bytes], pieces: list[bytes]) -> None:
    start, *body = sent(parts)
    assert dict(start["headers"])[b"content-length"] == str(sum(map(len, parts))).encode()
    assert [message["body"] for message in body] == pieces
    assert [message["more_body"] for message in body] == [True] * (len(pieces) - 1) + [False]
