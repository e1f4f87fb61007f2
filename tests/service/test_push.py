"""Who may be pushed to, and pushes that nobody takes."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from ipaddress import ip_address
from typing import Any

import pytest
import zmq

from service.errors import InvalidRequest, PushFailed
from service.handoff.push import Pusher

RECEIVERS = ("10.0.0.0/8", "127.0.0.1", "::1", "fe80::/10", "prefill", "*.example.org")


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("127.0.0.1", "127.0.0.1"),
        ("::1", "::1"),
        ("[::1]", "::1"),
        ("0:0::1", "::1"),
        ("prefill", "prefill"),
        ("Prefill", "prefill"),
        ("a.b.example.org", "a.b.example.org"),
    ],
)
def test_whom_the_operator_allows(host: str, name: str) -> None:
    receiver = Pusher(RECEIVERS, timeout_s=1).receiver(host, 5000)
    assert (receiver.host, receiver.port) == (name, 5000)
    assert receiver.literal == (None if name[-1].isalpha() else ip_address(name))


@pytest.mark.parametrize(
    "host",
    [
        *("11.0.0.1", "127.0.0.2", "127.1", "2130706433", "0x7f000001", "::ffff:10.0.0.1", "::2", "fe80::1%eth0"),
        *("fe80::1%a]:1;[::1", "10.0.0.1;10.0.0.2", "10.0.0.1:1", "tcp://10.0.0.1", "10.0.0.1\n", "10.0.0.1 "),
        *("example.org", "prefill.example.com", "x.prefill", "a\0.example.org", "a b.example.org", "ä.example.org"),
        *("", "*", "*.example.org", ".example.org", "a..example.org", "prefill:80", "[prefill", "user@prefill"),
    ],
)
def test_nobody_else(host: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Pusher(RECEIVERS, timeout_s=1).receiver(host, 5000)
    assert caught.value.param == "prefill_host"
    assert host == "" or host not in caught.value.message


def run(check: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(check())  # type: ignore[arg-type]


@pytest.fixture
def pull() -> Any:
    context = zmq.Context()
    opened = context.socket(zmq.PULL)
    opened.rcvhwm = 1
    opened.rcvbuf = 4096
    opened.rcvtimeo = 20_000
    yield opened
    opened.close(linger=0)
    context.term()


@pytest.mark.parametrize(("host", "bound"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]"), ("localhost", "127.0.0.1")])
def test_every_byte_arrives(pull: Any, host: str, bound: str) -> None:
    pull.ipv6 = bound.startswith("[")
    port = pull.bind_to_random_port(f"tcp://{bound}")
    frames = [b"first", memoryview(bytes(range(256)) * 40_000)]

    async def check() -> None:
        pusher = Pusher((host,), timeout_s=20)
        receiver = pusher.receiver(host, port)
        if receiver.literal is None:
            pusher._resolve = resolves_to("127.0.0.1")
        sending = asyncio.create_task(pusher.push(receiver, frames))
        received = await asyncio.to_thread(pull.recv_multipart)
        await sending
        assert received == [bytes(frame) for frame in frames]

    run(check)


def resolves_to(*addresses: str) -> Any:
    async def resolve(host: str, port: int) -> list[Any]:
        return [ip_address(address) for address in addresses]

    return resolve


def test_a_name_without_an_address() -> None:
    async def resolve(host: str, port: int) -> list[Any]:
        raise socket.gaierror

    async def check() -> None:
        pusher = Pusher(("prefill",), timeout_s=20)
        pusher._resolve = resolve  # type: ignore[assignment]
        with pytest.raises(PushFailed, match="no address"):
            await pusher.push(pusher.receiver("prefill", 5000), [b"a"])

    run(check)


def test_a_receiver_that_stops_reading_is_given_up() -> None:
    # The beginning of a PULL socket's connection, as ZMTP 3.0 (23/ZMTP) has it: greeting and READY.
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL".ljust(23, b"\0") + bytes(32)
    ready = b"\x04\x1a\x05READY\x0bSocket-Type\x00\x00\x00\x04PULL"

    writers: list[asyncio.StreamWriter] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting + ready)
        writers.append(writer)
        await reader.read(10)
        writer.transport.pause_reading()  # type: ignore[attr-defined]

    async def check() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0, limit=1024)
        pusher = Pusher(("127.0.0.1",), timeout_s=1)
        receiver = pusher.receiver("127.0.0.1", server.sockets[0].getsockname()[1])
        await pusher.push(receiver, [b"short"])  # the kernel holds it
        with pytest.raises(PushFailed, match="within 1 s"):
            await pusher.push(receiver, [b"first", memoryview(bytes(100_000_000))])
        server.close()
        for writer in writers:
            writer.close()
            await writer.wait_closed()

    run(check)


def test_many_that_wait_for_nobody_hold_up_no_other(pull: Any) -> None:
    port = pull.bind_to_random_port("tcp://127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        absent = silent.getsockname()[1]

        async def check() -> None:
            pusher = Pusher(("127.0.0.1",), timeout_s=3600)
            waiting = [
                asyncio.create_task(pusher.push(pusher.receiver("127.0.0.1", absent), [b"a"])) for _ in range(200)
            ]
            await pusher.push(pusher.receiver("127.0.0.1", port), [b"first"])
            assert await asyncio.to_thread(pull.recv_multipart) == [b"first"]
            assert not any(task.done() for task in waiting)
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

        run(check)
