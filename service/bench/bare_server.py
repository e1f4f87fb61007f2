"""A server that only sends: what the bytes of a large answer cost over loopback when they need not be made.

It answers a POST with as many bytes as it was told, always the same ones, and a GET with none. It prints its port.
`service.bench.front_end` runs it.
"""

import argparse
import asyncio
import sys
from typing import cast

import httptools
import numpy as np
import uvloop

from tp.process import die_with_parent


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description="A server that sends bytes and does nothing else.")
    parser.add_argument("--parent", type=int, required=True, help="pid of the process that starts this one")
    parser.add_argument("--bytes", type=int, required=True, help="length of an answer")
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(np.ones(arguments.bytes, np.uint8).data))


async def _serve(body: memoryview) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: _Connection(body), "127.0.0.1", 0)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


class _Connection(asyncio.Protocol):
    """One request after the other. `on_message_complete` is httptools' name."""

    def __init__(self, body: memoryview) -> None:
        self._body = body
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        assert self._transport is not None
        body = self._body if self._parser.get_method() == b"POST" else b""
        self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body))
        self._transport.write(body)


if __name__ == "__main__":
    main()
