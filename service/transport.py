"""The front-end's end of the control sockets: who is connected, what is in flight, and who was lost.

A `WorkerGroup` is one incarnation of a tensor-parallel group: the connections of its ranks. It is ready once every rank
said so and lost as soon as any rank hangs up, fails or breaks the protocol; a lost group never comes back, the next
incarnation is a new object. What to do about a loss is `service.dispatch`'s business.
"""

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from tp import wire
from tp.slab import Slab

log = logging.getLogger("tpvision.transport")

Loss = Literal["died", "hung", "said_failure", "broke_protocol"]
LOSSES: tuple[Loss, ...] = get_args(Loss)

_HELLO_TIMEOUT_S = 10.0
_BACKLOG = 64
_ACCEPT_PAUSE_S = 1.0


class GroupLost(Exception):
    """A rank of the group hung up, failed or broke the protocol. The text is the first reason seen."""


class ControlSocketError(RuntimeError):
    """The control socket cannot be made: another front-end listens on its path, or the path cannot be used."""


class RankConnection:
    """One rank: its hello, and the stream to it."""

    def __init__(self, hello: wire.Hello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.hello = hello
        self.reader = reader
        self.writer = writer
        self.gone = asyncio.Event()  # its end of the socket is closed: the process can touch nothing any more


@dataclass(frozen=True, slots=True)
class Answer:
    """What all ranks said of a batch, in their order, and since when they had no other before it (time.monotonic)."""

    began_at: float
    replies: Sequence[wire.Done]


class WorkerGroup:
    """The connected ranks of one incarnation, and the batches they are working on, one after the other."""

    def __init__(self, index: int, incarnation: str, world_size: int, on_lost: "Callable[[WorkerGroup], None]") -> None:
        self._on_lost = on_lost
        self.index = index
        self.incarnation = incarnation
        self.world_size = world_size
        self.ranks: dict[int, RankConnection] = {}
        self.readiness: dict[int, wire.Ready] = {}  # what each rank that is ready said
        self.ready = asyncio.Event()
        self.lost = asyncio.Event()
        self.reason = ""
        self.loss: Loss = "died"  # the kind of it
        self.is_fatal = False  # the next incarnation would end the same way
        self.gone = asyncio.Event()  # lost, and no process of it can touch the slab any more
        self.idle = asyncio.Event()  # nothing is in flight, so its ranks hear what they are told
        self.idle.set()
        self._replies: dict[int, dict[int, wire.Done]] = {}
        self._waiting: dict[int, asyncio.Future[list[wire.Done]]] = {}

    async def encode(self, batch: wire.Batch, timeout_s: float | None = None) -> Answer:
        """Send the batch to every rank and wait for every reply. Raises GroupLost, or TimeoutError.

        The time runs from when the batches before it are answered.
        """
        if self.lost.is_set():
            raise GroupLost(self.reason)
        before = list(self._waiting.values())
        future: asyncio.Future[list[wire.Done]] = asyncio.get_running_loop().create_future()
        self._waiting[batch.batch_id] = future
        self._replies[batch.batch_id] = {}
        self.idle.clear()
        try:
            self._send_to_all(batch)
            if before:
                await asyncio.wait(before)
            began_at = time.monotonic()
            async with asyncio.timeout(timeout_s):
                return Answer(began_at, await future)
        finally:
            del self._waiting[batch.batch_id], self._replies[batch.batch_id]
            if not self._waiting:
                self.idle.set()

    def stop(self) -> None:
        """Tell every rank to finish and exit 0."""
        self._send_to_all(wire.Stop())

    def mark_lost(self, reason: str, *, loss: Loss = "died", is_fatal: bool = False) -> None:
        """Fail what is in flight and hang up on every rank, so that each watchdog ends its process. Idempotent."""
        if self.lost.is_set():
            return
        self.loss = loss
        self.reason = reason
        self.is_fatal = is_fatal
        self.lost.set()
        self._on_lost(self)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(GroupLost(reason))
        for rank in self.ranks.values():
            with contextlib.suppress(OSError):  # it may be gone already
                rank.writer.write_eof()  # our end only: theirs closing is how we know that the process is gone

    async def wait_for_ends(self) -> None:
        """Until every rank has closed its end, as the kernel does for a process that is gone; then it is `gone`."""
        for rank in list(self.ranks.values()):
            await rank.gone.wait()
        self.gone.set()

    def add(self, rank: RankConnection) -> None:
        """Take in a rank that said a hello we accept."""
        self.ranks[rank.hello.rank] = rank

    def mark_ready(self, rank: int, message: wire.Ready) -> None:
        """Note that one rank is ready; the group is when all are."""
        self.readiness[rank] = message
        if len(self.readiness) == self.world_size:
            self.ready.set()

    def settle(self, rank: int, done: wire.Done) -> None:
        """Note one rank's reply; the batch is finished when every rank has replied."""
        replies = self._replies.get(done.batch_id)
        if replies is None:
            reason = f"rank {rank} answered batch {done.batch_id}, which it was not given"
            self.mark_lost(reason, loss="broke_protocol")
            return
        replies[rank] = done
        future = self._waiting[done.batch_id]
        if len(replies) == self.world_size and not future.done():
            future.set_result([replies[index] for index in sorted(replies)])

    def _send_to_all(self, message: wire.Message) -> None:
        frame = wire.encode(message)
        for rank in self.ranks.values():
            rank.writer.write(frame)


class ControlServer:
    """Listens on the control socket, checks every hello against our contract, and keeps the current groups."""

    def __init__(
        self,
        path: Path,
        *,
        contract: wire.Contract,
        num_groups: int,
        slab: Slab,
        patch_capacities: Sequence[int],
        on_ready: Callable[[WorkerGroup], None],
        on_lost: Callable[[WorkerGroup], None],
        on_progress: Callable[[WorkerGroup, int, wire.Progress], None],
    ) -> None:
        self.path = path
        self.groups: dict[int, WorkerGroup] = {}
        self.num_incarnations: dict[int, int] = {}  # of each group, so far
        self.weights_fingerprint: str | None = None  # of the first rank ever; all others must agree
        self._contract = contract
        self._num_groups = num_groups
        self._welcome = wire.Welcome(
            slab_patches=slab.layout.num_patches,
            slab_bytes=slab.layout.total_bytes,
            patch_capacities=list(patch_capacities),
        )
        self._slab = slab
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._on_progress = on_progress
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen. A stale path is replaced; raises ControlSocketError if somebody answers on it."""
        self._listener = _listen(self.path)
        self._spawn(self._accept(self._listener))

    async def stop(self) -> None:
        """Hang up on everybody and remove the path."""
        for group in self.groups.values():
            group.mark_lost("the front-end is stopping")
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
            self.path.unlink(missing_ok=True)

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            except OSError as error:  # no more open files, say: the rank waits meanwhile
                log.error("a rank cannot be let in now: %s", error.strerror)
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            self._spawn(self._serve(connection))

    async def _serve(self, connection: socket.socket) -> None:
        try:
            async with asyncio.timeout(_HELLO_TIMEOUT_S):
                hello = await _receive_hello(connection)
        except (wire.WireError, OSError, TimeoutError, EOFError) as error:
            if not isinstance(error, EOFError):  # else somebody only looked whether we listen
                log.warning("a peer on the control socket was turned away: %s", error or type(error).__name__)
            connection.close()
            return
        reason = self._reason_to_refuse(hello)
        if reason is not None:
            log.error("group %d rank %d refused: %s", hello.group, hello.rank, reason)
            await asyncio.get_running_loop().sock_sendall(connection, wire.encode(wire.Refused(reason=reason)))
            connection.close()
            return
        try:
            socket.send_fds(
                connection, [wire.encode(self._welcome)], [self._slab.fd]
            )  # one small frame into an empty socket: never partial
        except OSError as error:
            log.warning("group %d rank %d left before its welcome: %s", hello.group, hello.rank, error)
            connection.close()
            return
        group = self._group_of(hello)
        reader, writer = await asyncio.open_unix_connection(sock=connection)
        rank = RankConnection(hello, reader, writer)
        group.add(rank)
        try:
            await self._listen_to(group, rank)
        finally:
            rank.gone.set()
            writer.close()

    async def _listen_to(self, group: WorkerGroup, rank: RankConnection) -> None:
        number = rank.hello.rank
        try:
            while True:
                message = await _read_message(rank.reader)
                match message:
                    case wire.Progress():
                        self._on_progress(group, number, message)
                    case wire.Ready():
                        group.mark_ready(number, message)
                        if group.ready.is_set():
                            self._on_ready(group)
                    case wire.Done():
                        group.settle(number, message)
                    case wire.Failed():
                        reason = f"rank {number} failed: {message.reason}"
                        group.mark_lost(reason, loss="said_failure", is_fatal=message.is_fatal)
                    case _:
                        group.mark_lost(f"rank {number} sent a {type(message).__name__}", loss="broke_protocol")
        except (EOFError, OSError):
            group.mark_lost(f"rank {number} is gone")
        except wire.WireError as error:
            group.mark_lost(f"rank {number} broke the protocol: {error}", loss="broke_protocol")
            await rank.reader.read()  # until its end of the socket closes

    def _reason_to_refuse(self, hello: wire.Hello) -> str | None:
        differences = self._contract.differences(hello.contract)
        expected = self.weights_fingerprint or hello.weights_fingerprint
        if differences:
            return f"the front-end and the rank were configured differently: {'; '.join(differences)}"
        if hello.group >= self._num_groups or hello.rank >= self._contract.world_size:
            return (
                f"group {hello.group} rank {hello.rank} is outside {self._num_groups} groups of "
                f"{self._contract.world_size} ranks"
            )
        if hello.weights_fingerprint != expected:
            return f"weights fingerprint: {expected} here, {hello.weights_fingerprint} there"
        return self._reason_it_has_no_place(hello)

    def _reason_it_has_no_place(self, hello: wire.Hello) -> str | None:
        current = self.groups.get(hello.group)
        if current is None or (current.lost.is_set() and current.incarnation != hello.incarnation):
            return None
        if current.incarnation != hello.incarnation:
            return f"group {hello.group} is already served by incarnation {current.incarnation}"
        if current.lost.is_set():
            return f"incarnation {hello.incarnation} was lost: {current.reason}"
        return f"rank {hello.rank} is already connected" if hello.rank in current.ranks else None

    def _group_of(self, hello: wire.Hello) -> WorkerGroup:
        self.weights_fingerprint = self.weights_fingerprint or hello.weights_fingerprint
        group = self.groups.get(hello.group)
        if group is None or group.incarnation != hello.incarnation:
            group = WorkerGroup(hello.group, hello.incarnation, self._contract.world_size, self._on_lost)
            self.groups[hello.group] = group
            self.num_incarnations[hello.group] = self.num_incarnations.get(hello.group, 0) + 1
        return group

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _receive_hello(connection: socket.socket) -> wire.Hello:
    loop = asyncio.get_running_loop()
    connection.setblocking(False)
    received = bytearray()
    needed = wire.HEADER_BYTES
    kind = None
    while len(received) < needed:
        chunk = await loop.sock_recv(connection, needed - len(received))
        if not chunk:
            raise EOFError("it hung up before its hello")
        received += chunk
        if kind is None and len(received) == wire.HEADER_BYTES:
            kind, length = wire.decode_header(bytes(received))
            needed += length
    assert kind is not None
    message = wire.decode_payload(kind, bytes(received[wire.HEADER_BYTES :]))
    if not isinstance(message, wire.Hello):
        raise wire.WireError(f"expected a hello, not a {type(message).__name__}")
    return message


async def _read_message(reader: asyncio.StreamReader) -> wire.Message:
    kind, length = wire.decode_header(await reader.readexactly(wire.HEADER_BYTES))
    return wire.decode_payload(kind, await reader.readexactly(length))


def _listen(path: Path) -> socket.socket:
    try:
        _remove_stale(path)
        return _bind(path)
    except OSError as error:
        raise ControlSocketError(f"cannot listen on the control socket {path}: {error.strerror}") from error


def _remove_stale(path: Path) -> None:
    if path.exists() and not path.is_socket():
        raise ControlSocketError(f"{path} is there and is not a socket")
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        probe.setblocking(False)
        try:
            with contextlib.suppress(BlockingIOError):  # somebody listens, and does not accept
                probe.connect(str(path))
        except (FileNotFoundError, NotADirectoryError):
            pass
        except ConnectionRefusedError:
            path.unlink()  # left behind by a front-end that was killed
        else:
            raise ControlSocketError(f"another front-end is listening on {path}")


def _bind(path: Path) -> socket.socket:
    with contextlib.ExitStack() as undo:
        listener = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
        old_umask = os.umask(0o177)  # only this user may connect
        try:
            listener.bind(str(path))
        finally:
            os.umask(old_umask)
        listener.listen(_BACKLOG)
        undo.pop_all()
        return listener
