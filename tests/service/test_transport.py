"""The control socket: hellos compared with both values, replies matched, losses seen."""

import asyncio
import contextlib
import dataclasses
import os
import resource
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from service.transport import ControlServer, ControlSocketError, GroupLost, WorkerGroup
from tp import wire
from tp.control import ControlClient, RefusedError
from tp.settings import load_settings
from tp.slab import Slab, SlabLayout
from tp.spec import PUBLISHED_K3

SETTINGS = load_settings(flags={"parallel.tensor": 2}).settings
CONTRACT = wire.contract_for(SETTINGS, PUBLISHED_K3, 2)
LAYOUT = SlabLayout(num_patches=256, patch_bytes=588, token_bytes=16)
BATCH = wire.Batch(batch_id=7, images=[wire.BatchImage(start=0, t=1, h=2, w=2)])


def hello(
    rank: int = 0, incarnation: str = "first", contract: wire.Contract = CONTRACT, weights: str = "w"
) -> wire.Hello:
    return wire.Hello(
        group=0, incarnation=incarnation, rank=rank, pid=os.getpid(), contract=contract, weights_fingerprint=weights
    )


class Listening:
    """A real control server on a loop; ranks are played by blocking clients in threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ready: asyncio.Queue[WorkerGroup] = asyncio.Queue()
        self.lost: asyncio.Queue[WorkerGroup] = asyncio.Queue()

    async def __aenter__(self) -> "Listening":
        self.slab = Slab.create(LAYOUT)
        self.server = ControlServer(
            self.path,
            contract=CONTRACT,
            num_groups=1,
            slab=self.slab,
            patch_capacities=[16, 64],
            on_ready=self.ready.put_nowait,
            on_lost=self.lost.put_nowait,
            on_progress=lambda group, rank, progress: None,
        )
        await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.stop()
        self.slab.close()

    async def join(self, said: wire.Hello) -> ControlClient:
        def connect() -> ControlClient:
            client = ControlClient.connect(self.path, timeout_s=5)
            try:
                welcome, descriptor = client.greet(said)
            except BaseException:  # whatever it is, and the test fails by it; only the socket is closed first
                client.close()
                raise
            assert (welcome.slab_patches, welcome.slab_bytes) == (LAYOUT.num_patches, LAYOUT.total_bytes)
            assert welcome.patch_capacities == [16, 64]
            os.close(descriptor)
            client.send(
                wire.Ready(
                    device="cpu",
                    weights_bytes=1,
                    slab_bytes=welcome.slab_bytes,
                    resident_bytes=1,
                    warm_up_patches=16,
                    warm_up_s=0.1,
                )
            )
            return client

        return await asyncio.to_thread(connect)


def on_a_loop(test: Callable[[Path], Awaitable[None]]) -> Callable[[Path], None]:
    def run(tmp_path: Path) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(20):
                await test(tmp_path / "control.sock")

        asyncio.run(bounded())

    run.__name__ = test.__name__
    return run


@on_a_loop
async def test_a_group_is_ready_when_every_rank_is_and_answers_when_every_rank_did(path: Path) -> None:
    async with Listening(path) as listening:
        clients = [await listening.join(hello(rank)) for rank in (0, 1)]
        group = await listening.ready.get()
        encoding = asyncio.create_task(group.encode(BATCH))
        for rank, client in enumerate(clients):
            assert await asyncio.to_thread(client.receive) == BATCH
            assert not encoding.done()
            client.send(wire.Done(batch_id=7, non_finite=[], forward_s=float(rank), all_gather_s=0.0))
        assert group.idle.is_set() is False
        assert [done.forward_s for done in (await encoding).replies] == [0.0, 1.0]
        assert group.idle.is_set()
        for client in clients:
            client.close()


@on_a_loop
async def test_the_time_of_a_batch_runs_from_when_those_before_it_are_answered(path: Path) -> None:
    async with Listening(path) as listening:
        clients = [await listening.join(hello(rank)) for rank in (0, 1)]
        group = await listening.ready.get()
        first = asyncio.create_task(group.encode(BATCH))
        second = asyncio.create_task(group.encode(BATCH.model_copy(update={"batch_id": 8}), 0.1))
        await asyncio.sleep(0.3)
        assert not second.done()
        sent_at = time.monotonic()
        for client in clients:
            client.send(wire.Done(batch_id=7, non_finite=[], forward_s=0.0, all_gather_s=0.0))
        assert (await first).began_at < sent_at
        with pytest.raises(TimeoutError):
            await second
        assert group.idle.is_set()
        for client in clients:
            client.close()


@on_a_loop
async def test_of_two_batches_in_flight_each_gets_its_own_replies_and_its_turn(path: Path) -> None:
    async with Listening(path) as listening:
        clients = [await listening.join(hello(rank)) for rank in (0, 1)]
        group = await listening.ready.get()
        ids = (7, 8)
        encoding = [asyncio.create_task(group.encode(BATCH.model_copy(update={"batch_id": each}))) for each in ids]
        for client in clients:  # rank 0 is done with both before rank 1 is with any
            for each in ids:
                await asyncio.to_thread(client.receive)
                client.send(wire.Done(batch_id=each, non_finite=[], forward_s=float(each), all_gather_s=0.0))
        first, second = await asyncio.gather(*encoding)
        assert [[done.batch_id for done in answer.replies] for answer in (first, second)] == [[7, 7], [8, 8]]
        assert first.began_at < second.began_at
        for client in clients:
            client.close()


@pytest.mark.parametrize("how", ["hangs up", "fails", "breaks the protocol", "answers what it was not given"])
def test_a_lost_rank_loses_the_group_and_what_is_in_flight(tmp_path: Path, how: str) -> None:
    async def run() -> None:
        async with asyncio.timeout(20), Listening(tmp_path / "control.sock") as listening:
            clients = [await listening.join(hello(rank)) for rank in (0, 1)]
            group = await listening.ready.get()
            encoding = asyncio.create_task(group.encode(BATCH))
            await asyncio.to_thread(clients[1].receive)
            match how:
                case "hangs up":
                    clients[1].close()
                case "fails":
                    clients[1].send(wire.Failed(reason="boom", is_fatal=False))
                case "breaks the protocol":
                    clients[1]._socket.sendall(b"GET / HTTP/1.1\r\n\r\n")
                case _:
                    clients[1].send(wire.Done(batch_id=8, non_finite=[], forward_s=0.0, all_gather_s=0.0))
            with pytest.raises(GroupLost, match="rank 1"):
                await encoding
            with pytest.raises(GroupLost):
                await group.encode(BATCH)
            for client in clients:
                client.close()
            assert await listening.lost.get() is group
            await group.wait_for_ends()

    asyncio.run(run())


def refused(path: Path, said: wire.Hello, *, after: wire.Hello | None = None) -> str:
    async def run() -> str:
        async with asyncio.timeout(20), Listening(path) as listening:
            client = await listening.join(after) if after else None
            with pytest.raises(RefusedError) as caught:
                await listening.join(said)
            if client:
                client.close()
            return str(caught.value)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"protocol": 99}, [f"protocol: {wire.PROTOCOL_VERSION} here, 99 there"]),
        ({"world_size": 4}, ["world_size: 2 here, 4 there"]),
        ({"dtype": "float32"}, ["dtype: 'bfloat16' here, 'float32' there"]),
        ({"spec": dataclasses.replace(PUBLISHED_K3, num_layers=3).as_dict()}, ["spec.num_layers: 27 here, 3 there"]),
        ({"dtype": "float16", "rms_norm_eps": 0.5}, ["dtype: 'bfloat16' here, 'float16' there", "rms_norm_eps"]),
    ],
)
def test_a_different_contract_is_refused_with_both_values(
    tmp_path: Path, change: dict[str, Any], words: list[str]
) -> None:
    reason = refused(tmp_path / "s", hello(contract=CONTRACT.model_copy(update=change)))
    for phrase in words:
        assert phrase in reason


def test_other_weights_are_refused_with_both_fingerprints(tmp_path: Path) -> None:
    reason = refused(tmp_path / "s", hello(1, weights="other"), after=hello(0))
    assert reason == "weights fingerprint: w here, other there"


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (hello(2), "group 0 rank 2 is outside 1 groups of 2 ranks"),
        (hello(0), "rank 0 is already connected"),
        (hello(1, incarnation="second"), "group 0 is already served by incarnation first"),
    ],
)
def test_a_rank_that_has_no_place_is_refused(tmp_path: Path, said: wire.Hello, reason: str) -> None:
    assert refused(tmp_path / "s", said, after=hello(0)) == reason


@on_a_loop
async def test_a_new_incarnation_takes_the_place_of_a_lost_one(path: Path) -> None:
    async with Listening(path) as listening:
        (await listening.join(hello(0))).close()
        await listening.server.groups[0].lost.wait()
        client = await listening.join(hello(0, incarnation="second"))
        assert listening.server.groups[0].incarnation == "second"
        client.close()


@pytest.mark.parametrize(
    "frame",
    [b"", b"nonsense that is longer than a header", wire.encode(wire.Stop()), wire.encode(hello())[:-3]],
    ids=["nothing", "nonsense", "not a hello", "cut short"],
)
def test_strangers_are_turned_away_and_others_still_join(tmp_path: Path, frame: bytes) -> None:
    async def run() -> None:
        async with asyncio.timeout(20), Listening(tmp_path / "s") as listening:
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(str(listening.path))
                stranger.sendall(frame)
                stranger.shutdown(socket.SHUT_WR)
                stranger.settimeout(5)
                with contextlib.suppress(ConnectionResetError):  # what it sent last was not read
                    assert await asyncio.to_thread(stranger.recv, 1) == b""
            (await listening.join(hello(0))).close()

    asyncio.run(run())


@on_a_loop
async def test_a_rank_that_comes_while_there_is_no_file_left_is_let_in_later(path: Path) -> None:
    async with Listening(path) as listening:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with socket.socket(socket.AF_UNIX) as rank, contextlib.closing(rank.dup()) as spare:
            resource.setrlimit(resource.RLIMIT_NOFILE, (spare.fileno(), hard))  # so many, and no more
            try:
                rank.connect(str(path))
                await asyncio.sleep(0.1)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        (await listening.join(hello(0))).close()


def test_a_file_at_the_path_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("precious")

    async def run() -> None:
        with pytest.raises(ControlSocketError, match="not a socket"):
            await Listening(path).__aenter__()

    asyncio.run(run())
    assert path.read_text() == "precious"


def test_a_path_that_cannot_even_be_looked_at_is_an_error_of_ours(tmp_path: Path) -> None:
    async def run() -> None:
        with pytest.raises(ControlSocketError, match="File name too long"):
            await Listening(tmp_path / ("s" * 300)).__aenter__()

    asyncio.run(run())


@pytest.mark.parametrize("kind", [socket.SOCK_DGRAM, socket.SOCK_STREAM], ids=["datagram", "accepts nobody"])
def test_a_socket_of_somebody_else_is_left_alone(tmp_path: Path, kind: int) -> None:
    path = tmp_path / "s"

    async def run() -> None:
        async with asyncio.timeout(5):
            with pytest.raises(ControlSocketError, match=str(path)):
                await Listening(path).__aenter__()

    with socket.socket(socket.AF_UNIX, kind) as other, socket.socket(socket.AF_UNIX, kind) as waiting:
        other.bind(str(path))
        if kind == socket.SOCK_STREAM:
            other.listen(0)
            waiting.connect(str(path))  # nobody else can now
        asyncio.run(run())
    assert path.is_socket()


def test_a_rank_that_leaves_before_its_welcome_takes_nobodys_place(tmp_path: Path) -> None:
    async def run() -> None:
        async with asyncio.timeout(20), Listening(tmp_path / "s") as listening:
            with socket.socket(socket.AF_UNIX) as hasty:
                hasty.connect(str(listening.path))
                hasty.sendall(wire.encode(hello(0)))
            (await listening.join(hello(0, incarnation="second"))).close()

    asyncio.run(run())


def test_a_stale_path_is_replaced_and_a_live_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))

    async def run() -> None:
        async with Listening(path):
            with pytest.raises(ControlSocketError, match=str(path)):
                await Listening(path).__aenter__()

    asyncio.run(run())
    assert not path.exists()
