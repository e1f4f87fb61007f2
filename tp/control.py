"""A rank's end of the control socket: blocking, because a rank waits for work here and not in a collective.

A watchdog thread sees the front-end's end-of-file also while the main thread computes, and ends the process: there is
nobody left to answer, and the group must not outlive its front-end.
"""

import array
import contextlib
import os
import select
import socket
import threading
import time
from pathlib import Path

from tp import wire

EXIT_FRONT_END_GONE = 66
_RETRY_S = 0.2
_MAX_REASON_CHARS = 4000


class ControlError(RuntimeError):
    """The front-end cannot be reached, hung up, or broke the protocol."""


class RefusedError(ControlError):
    """The front-end does not take this rank; the text says why, with both values."""


class ControlClient:
    """One rank's connection. Used by the main thread alone; the watchdog only polls it."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._is_leaving = False

    @classmethod
    def connect(cls, path: Path, *, timeout_s: float) -> "ControlClient":
        """Connect, trying again until the front-end listens. Raises ControlError after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.connect(str(path))
                return cls(connection)
            except OSError as error:
                connection.close()
                if time.monotonic() > deadline:
                    raise ControlError(f"no front-end at {path} within {timeout_s:g} s: {error}") from error
                time.sleep(_RETRY_S)

    def greet(self, hello: wire.Hello) -> tuple[wire.Welcome, int]:
        """Say hello; return the welcome and the slab's descriptor. Raises RefusedError or ControlError."""
        self.send(hello)
        header, descriptors = self._receive_with_descriptor(wire.HEADER_BYTES)
        message = self._receive_payload(header)
        if isinstance(message, wire.Refused):
            raise RefusedError(message.reason)
        if not isinstance(message, wire.Welcome) or len(descriptors) != 1:
            raise ControlError(f"expected a welcome with the slab, not {type(message).__name__}")
        return message, descriptors[0]

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def send(self, message: wire.Message) -> None:
        """Send one message, whole."""
        self._socket.sendall(wire.encode(message))

    def send_failure(self, reason: str, *, is_fatal: bool) -> None:
        """Say why this rank is about to exit; whether anybody hears it does not matter any more."""
        self._is_leaving = True  # the front-end hangs up now, and torchrun is to have the reason from us
        printable = reason.encode(errors="replace").decode()[:_MAX_REASON_CHARS]
        with contextlib.suppress(OSError):
            self.send(wire.Failed(reason=printable, is_fatal=is_fatal))

    def receive(self) -> wire.Message | None:
        """Wait for the next message; None when the front-end hung up. Raises wire.WireError on a foreign frame."""
        header = self._receive_exactly(wire.HEADER_BYTES, allow_end=True)
        return self._receive_payload(header) if header else None

    def has_message(self, timeout_s: float) -> bool:
        """Whether the next message, or the end, is there; it may wait so long for it."""
        return bool(select.select([self._socket], [], [], timeout_s)[0])

    def watch(self) -> None:
        """Start the watchdog: end this process as soon as the front-end's end of the socket is closed."""
        threading.Thread(target=self._exit_on_hangup, name="front-end watchdog", daemon=True).start()

    def _exit_on_hangup(self) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP | select.POLLHUP | select.POLLERR)
        poll.poll()
        if not self._is_leaving:
            os._exit(EXIT_FRONT_END_GONE)

    def _receive_payload(self, header: bytes) -> wire.Message:
        kind, length = wire.decode_header(header)
        return wire.decode_payload(kind, self._receive_exactly(length))

    def _receive_exactly(self, size: int, *, allow_end: bool = False) -> bytes:
        chunks = bytearray()
        while len(chunks) < size:
            chunk = self._socket.recv(size - len(chunks))
            if not chunk:
                if allow_end and not chunks:
                    return b""
                raise ControlError("the front-end hung up in the middle of a message")
            chunks += chunk
        return bytes(chunks)

    def _receive_with_descriptor(self, size: int) -> tuple[bytes, list[int]]:
        space = socket.CMSG_SPACE(array.array("i").itemsize)
        chunk, ancillary, _, _ = self._socket.recvmsg(size, space, socket.MSG_CMSG_CLOEXEC)
        if not chunk:
            raise ControlError("the front-end hung up instead of answering the hello")
        descriptors = array.array("i")
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors.frombytes(data)
        return chunk + self._receive_exactly(size - len(chunk)), list(descriptors)
