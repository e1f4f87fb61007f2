"""Pushes messages over ZeroMQ to receivers that a request names and the operator allows.

Whoever names a receiver makes this machine connect somewhere, so only `handoff.sglang_receivers` may be named. Needs
the extra `sglang`; `service.handoff.routes` imports this only where a receiver is allowed.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_network

import zmq
import zmq.asyncio

from service.addresses import Address, matches, read_host
from service.errors import InvalidRequest, PushFailed
from service.fetch import SystemResolver

_POLL_S = 0.005
_LINGER_MS = 1000  # for its last bytes


@dataclass(frozen=True, slots=True)
class Receiver:
    """Where a message goes: a host that may be connected to, and as an address where it is one."""

    host: str
    literal: Address | None
    port: int


class Pusher:
    """Connects to nobody but the receivers that the operator allows. One per process."""

    def __init__(self, receivers: Sequence[str], *, timeout_s: float) -> None:
        """`receivers` as in `handoff.sglang_receivers`."""
        self._networks = []
        self._names = []
        for receiver in receivers:
            try:
                self._networks.append(ip_network(receiver))
            except ValueError:
                self._names.append(receiver)
        self._timeout_s = timeout_s
        self._resolve = SystemResolver()
        self._context = zmq.asyncio.Context.instance()  # which pyzmq ends with the process
        self._context.max_sockets = self._context.socket_limit  # limits.max_connections bounds them

    def receiver(self, host: str, port: int) -> Receiver:
        """The receiver of that name or address. Raises InvalidRequest unless it is one that the operator allows."""
        with contextlib.suppress(InvalidRequest):
            is_bracketed = host.startswith("[") and host.endswith("]")
            name, literal = read_host((host[1:-1] if is_bracketed else host).lower())
            if literal is None:
                is_allowed = any(matches(name, pattern) for pattern in self._names)
            else:
                is_allowed = "%" not in name and any(literal in network for network in self._networks)
            if is_allowed:
                return Receiver(name, literal, port)
        raise InvalidRequest("this receiver is not one that embeddings are pushed to", param="prefill_host")

    async def push(self, receiver: Receiver, frames: Sequence[bytes | memoryview]) -> None:
        """Send one message; its bytes have left when this returns. Raises PushFailed where nobody takes it in time."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._push(await self._address_of(receiver), receiver.port, frames)
        except TimeoutError:
            limit_s = self._timeout_s
            raise PushFailed(
                f"the receiver did not take the embeddings within {limit_s:g} s", numbers={"limit_s": limit_s}
            ) from None

    async def _address_of(self, receiver: Receiver) -> Address:
        if receiver.literal is not None:
            return receiver.literal
        try:
            return (await self._resolve(receiver.host, receiver.port))[0]
        except (OSError, UnicodeError):
            raise PushFailed("the receiver's name has no address") from None

    async def _push(self, address: Address, port: int, frames: Sequence[bytes | memoryview]) -> None:
        is_v6 = isinstance(address, IPv6Address)
        with self._context.socket(zmq.PUSH) as socket:
            socket.linger = 0
            socket.immediate = True  # nothing is queued for a receiver that is not there
            socket.ipv6 = is_v6
            socket.copy_threshold = 0  # else a short message counts as gone at once
            socket.connect(f"tcp://[{address}]:{port}" if is_v6 else f"tcp://{address}:{port}")
            tracker = await socket.send_multipart(frames, copy=False, track=True)
            assert tracker is not None
            while not tracker.done:  # noqa: ASYNC110 - an event of threads, for which no loop can wait
                await asyncio.sleep(_POLL_S)
            socket.linger = _LINGER_MS
