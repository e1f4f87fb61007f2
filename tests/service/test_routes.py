"""What every request passes through: nothing of it is called in a thread, and an answer leaves in few pieces."""

import asyncio
import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from fastapi import APIRouter
from fastapi.routing import APIRoute

from service import loan as module
from service.admission import RowAllocator, Rows
from service.handoff.routes import sglang_router, vllm_router
from service.loan import Loan
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


@pytest.mark.parametrize("fails_at", [None, 1, 3])
def test_a_loan_is_sent_piece_by_piece_and_ends_with_its_answer(
    monkeypatch: pytest.MonkeyPatch, fails_at: int | None
) -> None:
    monkeypatch.setattr(module, "_PIECE_BYTES", 2**16)
    tokens = np.arange(2**17, dtype=np.uint8).reshape(2, 2**16)
    bodies: list[bytes] = []

    async def send(message: Any) -> None:
        if len(bodies) == fails_at:
            raise OSError("gone")
        bodies.append(bytes(message.get("body", b"")))

    async def main() -> None:
        allocator = RowAllocator(8)
        (run,) = allocator.allocate([8]) or []
        rows = Rows(run, allocator)
        response = PartsResponse(Answer([b"head", Loan(tokens, rows)], "text/x", {}), {}, lambda: None)
        rows.release()
        with nullcontext() if fails_at is None else pytest.raises(OSError, match="gone"):
            await response({"type": "http"}, None, send)  # type: ignore[arg-type]  # an answer reads nothing
        assert allocator.num_free == 8

    asyncio.run(main())
    assert bodies == [b"", b"head", tokens[0].tobytes(), tokens[1].tobytes(), b""][:fails_at]
