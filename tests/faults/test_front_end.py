"""The front-end dies, drains, is overloaded or runs as PID 1: nothing is left behind and nothing is lost."""

import base64
import concurrent.futures
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from make_photograph import acceptance_picture
from playing import PlayedService
from running import (
    COMMAND,
    GOLDEN,
    ROOT,
    RunningService,
    assert_balanced,
    catches_sigterm,
    decoders_of,
    descendants,
    is_alive,
    ranks_of,
    wait_until,
)
from slow_pictures import with_scans

from service.demo_model import demo_config, demo_preprocessor_config
from tp import wire

pytestmark = pytest.mark.faults

MODEL = str(GOLDEN / "tiny-k3-f32")
GOOD = (GOLDEN / "images" / "rgb_64x48.png").read_bytes()
LARGE = acceptance_picture(1120, 1120)


def test_a_killed_front_end_leaves_nothing_and_the_next_one_starts_at_once(tmp_path: Path) -> None:
    arguments = ["--model", MODEL, "--tp", "2", "--socket", str(tmp_path / "control.sock")]
    for state in ("idle", "busy", "a rank is stopped"):  # each on the stale socket path that the one before left
        service = RunningService(arguments).wait_ready()
        assert service.encode(GOOD).status_code == 200
        pids = descendants(service.process.pid)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            if state == "busy":
                sent = pool.submit(service.encode, LARGE)
                wait_until(lambda url=service.url: num_free_patches(url) < 65536)
            if state == "a rank is stopped":
                os.kill(ranks_of(service)[0], signal.SIGSTOP)
            service.process.kill()
            wait_until(lambda pids=pids: not any(is_alive(pid) for pid in pids), timeout_s=3)
            if state == "busy":
                with pytest.raises(httpx.TransportError):
                    sent.result()
        service.stop()
    last = RunningService(arguments).wait_ready()
    assert last.encode(GOOD).status_code == 200
    assert last.stop() == 0


def test_a_sigterm_ends_a_start_whose_decode_processes_hang() -> None:
    environ = {"PYTHONPATH": str(Path(__file__).parent), "TP_HANG_DECODERS": "1"}
    service = RunningService(["--model", MODEL], environ)
    wait_until(lambda: decoders_of(service) != [], timeout_s=30)
    pids = descendants(service.process.pid)
    assert service.stop() == 0
    assert not any(is_alive(pid) for pid in pids)
    assert not [line for line in service.log if "too slow" in line or "Traceback" in line]


def num_free_patches(url: str) -> int:
    return httpx.get(url + "/v1/capacity").json()["in_flight"]["free_patches"]


def test_a_front_end_killed_while_its_ranks_start_leaves_nothing() -> None:
    service = RunningService(["--model", MODEL, "--tp", "2"])
    wait_until(lambda: len(ranks_of(service)) == 2, timeout_s=30)  # they import torch now
    pids = descendants(service.process.pid)
    service.process.kill()
    wait_until(lambda: not any(is_alive(pid) for pid in pids), timeout_s=3)
    service.stop()


def test_of_two_services_on_one_port_one_is_told_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    both = [RunningService(["--model", MODEL, "--port", str(port)]) for _ in range(2)]
    wait_until(lambda: any(service.process.poll() is not None for service in both), timeout_s=30)
    (loser,) = [service for service in both if service.process.poll() is not None]
    (winner,) = [service for service in both if service is not loser]
    assert (loser.stop(), f"port {port}" in loser.log[-1]) == (2, True)
    assert winner.wait_ready().encode(GOOD).status_code == 200
    assert winner.stop() == 0


def test_sigterm_under_load_finishes_what_was_accepted() -> None:
    patient = {"TPVISION_LIMITS__MAX_QUEUE_S": "600"}  # on a busy machine eight of these wait over a minute
    service = RunningService(["--model", MODEL, "--tp", "2"], patient).wait_ready()
    with concurrent.futures.ThreadPoolExecutor(8) as pool, httpx.Client(base_url=service.url) as other:
        answers = [pool.submit(service.encode, acceptance_picture(560, 560)) for _ in range(8)]
        wait_until(lambda: other.get("/v1/capacity").json()["requests"]["accepted"] == 8)
        service.process.send_signal(signal.SIGTERM)
        wait_until(lambda: other.get("/readyz").status_code == 503, timeout_s=1)
        assert other.get("/livez").status_code == 200
        assert other.post("/v1/encode", content=GOOD).json()["error"]["code"] == "not_ready"
        assert [answer.result().status_code for answer in answers] == [200] * 8
    assert service.process.wait(30) == 0
    service.stop()


def test_the_drain_has_a_limit() -> None:
    environ = {"TPVISION_LIMITS__DRAIN_TIMEOUT_S": "1"}
    service = RunningService(["--model", MODEL, "--tp", "2"], environ).wait_ready()
    with concurrent.futures.ThreadPoolExecutor(1) as pool, httpx.Client(base_url=service.url) as other:
        sent = pool.submit(service.encode, acceptance_picture())  # takes longer
        wait_until(lambda: other.get("/v1/capacity").json()["in_flight"]["free_patches"] < 65536)
        started = time.monotonic()
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(20) == 0
        assert time.monotonic() - started < 15
        assert sent.result().status_code == 503
    service.stop()


def stop_decoders(service: RunningService) -> int:
    """How many were there."""
    pids = decoders_of(service)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    return len(pids)


@pytest.mark.parametrize("signals", [1, 2])
def test_what_is_decoded_when_the_drain_ends_is_answered_too(signals: int) -> None:
    environ = {"TPVISION_LIMITS__DRAIN_TIMEOUT_S": "1", "TPVISION_LIMITS__DECODE_TIMEOUT_S": "60"}
    service = RunningService(["--model", MODEL, "--tp", "1"], environ).wait_ready()
    pids = descendants(service.process.pid)
    stop_decoders(service)
    in_json = json.dumps({"images": [base64.b64encode(GOOD).decode()]})
    with concurrent.futures.ThreadPoolExecutor(6) as pool, httpx.Client(base_url=service.url) as other:
        sent = [pool.submit(service.encode, GOOD) for _ in range(3)]  # more than there are processes
        wait_until(lambda: other.get("/v1/capacity").json()["requests"]["accepted"] == 3)
        unpacked = pool.submit(other.post, "/v1/encode", content=in_json, headers={"content-type": "application/json"})
        wait_until(lambda: held_bytes(service) > 4 * len(GOOD))
        for _ in range(signals):
            service.process.send_signal(signal.SIGTERM)
            time.sleep(0.2)  # two at once are one
        answers = [future.result(20) for future in (*sent, unpacked)]
    assert [(answer.status_code, answer.json()["error"]["code"]) for answer in answers] == [(503, "not_ready")] * 4
    assert service.process.wait(10) == signals - 1
    service.stop()
    assert not any(is_alive(pid) for pid in pids)


def test_json_that_waits_to_be_read_has_a_deadline_and_a_client_that_may_leave() -> None:
    environ = {"TPVISION_LIMITS__REQUEST_TIMEOUT_S": "5", "TPVISION_LIMITS__DECODE_TIMEOUT_S": "60"}
    service = RunningService(["--model", MODEL, "--tp", "1"], environ).wait_ready()
    num_processes = stop_decoders(service)
    body = json.dumps({"images": [base64.b64encode(GOOD).decode()]}).encode()
    head = ("POST /v1/encode HTTP/1.1", "Content-Type: application/json", f"Content-Length: {len(body)}")
    with contextlib.ExitStack() as stack:
        waiting = [stack.enter_context(connect(service, *head, body=body)) for _ in range(2 * num_processes)]
        wait_until(lambda: held_bytes(service) >= len(waiting) * len(body))
        connect(service, *head, body=body).close()
        wait_until(lambda: any(line["client_gone"] for line in service.requests), timeout_s=4)  # before its deadline
        wait_until(lambda: sum(line["status"] == 504 for line in service.requests) == len(waiting))
        wait_until(lambda: held_bytes(service) == 0)
    assert service.encode(GOOD).status_code == 200
    assert service.stop() == 0


def test_stopped_decode_processes_cost_no_request(start_service: Callable[..., RunningService]) -> None:
    service = start_service("--model", MODEL, "--tp", "1", TPVISION_LIMITS__DECODE_TIMEOUT_S="1")
    in_json = json.dumps({"images": [base64.b64encode(GOOD).decode()]})
    for content, kind in ((GOOD, "image/png"), (in_json, "application/json")):
        stop_decoders(service)
        answer = service.client.post("/v1/encode", content=content, headers={"content-type": kind})
        assert answer.status_code == 200
    assert_balanced(service)


def test_a_request_ends_at_its_deadline_in_the_middle_of_a_decode(start_service: Callable[..., RunningService]) -> None:
    limits = {"TPVISION_LIMITS__REQUEST_TIMEOUT_S": "2", "TPVISION_LIMITS__DECODE_TIMEOUT_S": "600"}
    service = start_service("--model", MODEL, "--tp", "1", "--policy", "downscale", **limits)
    answer = service.encode(with_scans(20_000))
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert_balanced(service)
    wait_until(lambda: service.scrape().value("decoders_replaced_total") == 1)
    assert service.encode(GOOD).status_code == 200


def test_a_second_sigterm_ends_it_now() -> None:
    service = RunningService(["--model", MODEL, "--tp", "2"]).wait_ready()
    pids = descendants(service.process.pid)
    with concurrent.futures.ThreadPoolExecutor(1) as pool, httpx.Client(base_url=service.url) as other:
        sent = pool.submit(service.encode, acceptance_picture())
        wait_until(lambda: other.get("/v1/capacity").json()["in_flight"]["free_patches"] < 65536)
        service.process.send_signal(signal.SIGTERM)
        wait_until(lambda: other.get("/readyz").status_code == 503)
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(5) == 1
        assert sent.result().status_code == 503
    service.stop()
    assert not any(is_alive(pid) for pid in pids)


def connect(service: RunningService, *head: str, body: bytes, receive_buffer: int | None = None) -> socket.socket:
    """A connection with a request on it, or the beginning of one."""
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(10)
    connection.connect(("127.0.0.1", int(service.url.rpartition(":")[2])))
    connection.sendall("\r\n".join([*head, "Host: x", "", ""]).encode() + body)
    return connection


def read_all(connection: socket.socket) -> bytes:
    answer = b""
    while data := connection.recv(2**16):
        answer += data
    return answer


def held_bytes(service: RunningService) -> int:
    return int(service.client.get("/v1/capacity").json()["in_flight"]["bytes"])


def test_who_still_sends_is_refused_at_once_and_does_not_hold_the_drain(tmp_path: Path) -> None:
    part = b'--b\r\nContent-Disposition: form-data; name="f"; filename="f"\r\n\r\nabc'
    post = "POST /v1/encode HTTP/1.1"
    environ = {"TPVISION_LIMITS__DRAIN_TIMEOUT_S": "30", "TPVISION_LIMITS__MAX_BODY_BYTES": "100000"}
    with PlayedService(tmp_path, **environ) as service, contextlib.ExitStack() as stack:
        unfinished = [
            connect(service, post, "Content-Length: 1000", body=b"abc"),
            connect(service, post, "Transfer-Encoding: chunked", body=b"3\r\nabc\r\n"),
            connect(service, post, "Content-Type: multipart/form-data; boundary=b", "Content-Length: 999", body=part),
            connect(service, post, "Content-Length: 200000", body=bytes(150000)),  # too large, and thrown away
        ]
        for connection in unfinished:
            stack.enter_context(connection)
        wait_until(lambda: held_bytes(service) == 3 + 3 + len(part))
        service.process.send_signal(signal.SIGTERM)
        for connection in unfinished:
            answer = read_all(connection)
            assert answer.startswith(b"HTTP/1.1 503") and b'"not_ready"' in answer and b"retry-after" in answer
        assert service.process.wait(5) == 0
    assert not [line for line in service.log if "Traceback" in line]


def test_reloads_do_not_disturb_the_end(tmp_path: Path) -> None:
    with PlayedService(tmp_path) as service:
        service.process.send_signal(signal.SIGTERM)
        while service.process.poll() is None:
            service.process.send_signal(signal.SIGHUP)
            time.sleep(0.0001)
        assert service.process.wait() == 0
    assert not [line for line in service.log if "Traceback" in line]


@contextlib.contextmanager
def unread_answer(service: RunningService) -> Iterator[None]:
    """A client that asks for 10 MB and does not read them."""
    item = base64.b64encode(acceptance_picture(308, 308)).decode()
    body = json.dumps({"images": [item] * 64}).encode()
    head = ("POST /v1/encode HTTP/1.1", "Accept: application/json", "Content-Type: application/json")
    with connect(service, *head, f"Content-Length: {len(body)}", body=body, receive_buffer=4096):
        wait_until(lambda: service.client.get("/v1/capacity").json()["requests"]["answered"] == 1, timeout_s=30)
        wait_until(lambda: held_bytes(service) > 2**20)
        yield


def test_an_answer_that_is_not_read_ends_with_the_drain(tmp_path: Path) -> None:
    with PlayedService(tmp_path, TPVISION_LIMITS__DRAIN_TIMEOUT_S="1") as service, unread_answer(service):
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(6) == 0
    assert not [line for line in service.log if "Traceback" in line or "ERROR" in line]


@pytest.mark.parametrize("reader", ["at once", "late", "half-closed", "leaves"])
def test_large_tokens_leave_the_slab_whoever_reads_them(tmp_path: Path, reader: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(demo_config("full")))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(demo_preprocessor_config()))
    head = ("POST /v1/encode HTTP/1.1", f"Content-Length: {len(LARGE)}", "Accept: application/octet-stream")
    num_bytes = 40 * 40 * 7168 * 2
    with PlayedService(tmp_path, model=tmp_path, TPVISION_CAPACITY__PATCH_CAPACITIES="6400") as service:
        buffer = None if reader == "at once" else 4096
        with connect(service, *head, body=LARGE, receive_buffer=buffer) as connection:
            if reader == "half-closed":
                connection.shutdown(socket.SHUT_WR)
            if reader != "at once":  # 23 MB of tokens, of which TCP holds 4
                wait_until(lambda: held_bytes(service) == num_bytes, timeout_s=30)
                wait_until(lambda: num_free_patches(service.url) == 4 * 6400)
                assert held_bytes(service) == num_bytes
            if reader != "leaves":
                *_, body = read_answer(connection)
                assert len(body) == num_bytes
            if reader in ("at once", "late"):  # the connection goes on
                connection.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
                assert read_answer(connection)[0].startswith(b"HTTP/1.1 200")
        wait_until(lambda: held_bytes(service) == 0)
        assert_balanced(service)
    assert not [line for line in service.log if "Traceback" in line or "ERROR" in line]


def read_answer(connection: socket.socket) -> tuple[bytes, bytes]:
    """Head and body of one answer."""
    head, body = b"", bytearray()
    while b"\r\n\r\n" not in head:
        head = (head + connection.recv(2**16)).removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    head, _, body[:] = head.partition(b"\r\n\r\n")
    length = int(next(line for line in head.split(b"\r\n") if line.startswith(b"content-length: ")).split()[1])
    while len(body) < length:
        body += connection.recv(2**16)
    return head, bytes(body)


@pytest.mark.parametrize("waits_for", ["a reader", "a rank"])
def test_a_second_sigterm_ends_it_now_whatever_it_waits_for(waits_for: str, tmp_path: Path) -> None:
    released = threading.Event()

    def on_message(message: wire.Message) -> None:
        if isinstance(message, wire.Stop) and waits_for == "a rank":
            released.wait(30)

    with PlayedService(tmp_path, on_message) as service, contextlib.ExitStack() as stack:
        if waits_for == "a reader":
            stack.enter_context(unread_answer(service))
        service.process.send_signal(signal.SIGTERM)
        shown = "Shutting down" if waits_for == "a reader" else "Finished server process"
        wait_until(lambda: any(shown in line for line in service.log))
        with pytest.raises(subprocess.TimeoutExpired):
            service.process.wait(1)
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(4) == 1
        released.set()
    assert not [line for line in service.log if "Traceback" in line]


def test_few_files_mean_few_connections_and_probes_all_the_same(tmp_path: Path) -> None:
    with PlayedService(tmp_path, command=["prlimit", "--nofile=120:120", *COMMAND]) as service:
        idle = [connect(service, body=b"") for _ in range(150)]
        for _ in range(5):
            assert httpx.get(service.url + "/livez", timeout=5, trust_env=False).status_code == 200
            assert httpx.post(service.url + "/v1/encode", content=GOOD, timeout=5, trust_env=False).status_code == 200
        for connection in idle:
            connection.close()


def test_sigterm_while_loading_leaves_nothing() -> None:
    service = RunningService(["--model", MODEL, "--tp", "2"])
    wait_until(lambda: any("Started server" in line or "slab" in line for line in service.log))
    wait_until(lambda: len(descendants(service.process.pid)) >= 3)
    pids = descendants(service.process.pid)
    assert service.stop() == 0
    wait_until(lambda: not any(is_alive(pid) for pid in pids), timeout_s=3)


def test_clients_that_leave_free_what_they_held() -> None:
    service = RunningService(["--model", MODEL, "--tp", "2"]).wait_ready()
    with concurrent.futures.ThreadPoolExecutor(50) as pool:

        def leave() -> None:
            with pytest.raises(httpx.TimeoutException):  # an encoding takes some 50 ms
                httpx.post(service.url + "/v1/encode", content=LARGE, timeout=httpx.Timeout(5, read=0.01))

        for future in [pool.submit(leave) for _ in range(50)]:
            future.result()
    wait_until(lambda: service.client.get("/v1/capacity").json()["requests"]["in_flight"] == 0, timeout_s=60)
    assert service.encode(GOOD).status_code == 200
    assert_balanced(service)
    assert service.client.get("/v1/capacity").json()["requests"]["client_gone"] > 0
    assert service.stop() == 0


def test_it_is_safe_as_pid_1() -> None:
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-m", "service"]
    service = RunningService(["--model", MODEL, "--tp", "2"], command=command).wait_ready()
    pid_1 = descendants(service.process.pid)[0]
    for _ in range(2):
        os.kill(ranks_of(service)[0], signal.SIGKILL)
        wait_until(lambda: service.client.get("/readyz").status_code == 503)
        wait_until(lambda: service.client.get("/readyz").status_code == 200, timeout_s=30)
    wait_until(lambda: zombies_below(pid_1) == 0)
    assert service.encode(GOOD).status_code == 200
    os.kill(pid_1, signal.SIGTERM)
    assert service.process.wait(20) == 0
    service.stop()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_as_pid_1_it_hears_a_signal_as_soon_as_it_runs(number: int) -> None:
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *COMMAND]
    service = RunningService(["--model", MODEL], command=command)
    wait_until(lambda: [pid for pid in descendants(service.process.pid) if catches_sigterm(pid)] != [])
    os.kill(descendants(service.process.pid)[0], number)
    assert service.process.wait(5) == 128 + number
    service.stop()
    assert service.log == []


def zombies_below(pid: int) -> int:
    listed = subprocess.run(["ps", "--no-headers", "-eo", "ppid,stat"], capture_output=True, text=True, check=True)
    return sum(line.split()[0] == str(pid) and line.split()[1][0] == "Z" for line in listed.stdout.splitlines())


def test_the_working_directory_does_not_matter(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "service", "demo", "--once", "--port", "0"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
