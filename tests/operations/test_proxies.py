"""nginx and Envoy with our configurations: what is large goes through, and every refusal is the service's own."""

import concurrent.futures
import contextlib
import io
import json
import os
import shutil
import signal
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors
import safetensors.torch
from PIL import Image
from proxies import NAMES, Proxy, running_proxy
from running import GOLDEN, RunningService, images_of, ranks_of, wait_until

pytestmark = pytest.mark.operations

MAX_BODY_BYTES = 64 * 2**20
STALL_S = 4
NGINX_REQUESTS_OF_A_CLIENT = 32
GOOD = (GOLDEN / "images" / "rgb_64x48.png").read_bytes()
NUM_IMAGES, TOKENS, HIDDEN = 8, 256, 7168  # in float32 58,720,256 bytes, as a full tier of K3 in bfloat16
HEADER_IMAGES = 16  # the most whose geometry goes into headers


def write_wide_model(folder: Path) -> None:
    """The tiny golden model with tokens as wide as K3's: each row of its projector, again and again."""
    shutil.copytree(GOLDEN / "tiny-k3-f32", folder)
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["text_hidden_size"] = config["text_config"]["hidden_size"] = HIDDEN
    (folder / "config.json").write_text(json.dumps(config))
    (path,) = folder.glob("model-00002-*")
    tensors = safetensors.torch.load_file(path)
    for name in ("mm_projector.proj.2.weight", "mm_projector.post_norm.weight"):
        tensors[name] = tensors[name].repeat_interleave(HIDDEN // len(tensors[name]), dim=0)
    safetensors.torch.save_file(tensors, path)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    model = tmp_path_factory.mktemp("models") / "wide"
    write_wide_model(model)
    environ = {f"TPVISION_LIMITS__{name}_TIMEOUT_S": str(STALL_S) for name in ("BODY", "SEND")}
    environ["TPVISION_LIMITS__MAX_QUEUE_S"] = "10000"  # ranks that were held look slow
    arguments = ["--model", str(model), "--capacities", "1024,4096", "--policy", "downscale"]
    service = RunningService(arguments, environ).wait_ready()
    yield service
    assert service.stop() == 0


@pytest.fixture(scope="module", params=NAMES)
def proxy(
    request: pytest.FixtureRequest, service: RunningService, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Proxy]:
    folder = tmp_path_factory.mktemp(request.param)
    with running_proxy(request.param, behind=service.url, folder=folder) as proxy:
        yield proxy


def error_code(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["code"])


def bitmap(num_bytes: int) -> bytes:
    """A BMP file of exactly so many bytes: as many rows as fit, and what is left over behind them."""
    width = 4728
    height = (num_bytes - 54) // (3 * width)
    offset_and_size = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, 0, 2835, 2835, 0, 0)
    return (b"BM" + struct.pack("<IHHI", num_bytes, 0, 0, 54) + offset_and_size).ljust(num_bytes, b"\x80")


def small_picture() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (448, 448), (200, 90, 20)).save(file, "PNG")
    return file.getvalue()


def test_a_body_of_64_mib_is_encoded(proxy: Proxy) -> None:
    (image,) = images_of(proxy.client.post("/v1/encode", content=bitmap(MAX_BODY_BYTES)))
    assert image["downscaled"] and image["original_size"][0] == 4728


@pytest.mark.parametrize("form", ["with its length", "in chunks"])
def test_one_byte_more_is_refused_by_the_service(proxy: Proxy, form: str) -> None:
    content = bytes(MAX_BODY_BYTES + 1)
    pieces = (content[start : start + 2**20] for start in range(0, len(content), 2**20))
    answer = proxy.client.post("/v1/encode", content=content if form == "with its length" else pieces)
    assert (answer.status_code, error_code(answer)) == (413, "body_too_large")
    assert answer.headers["x-request-id"]


def test_an_answer_of_58_mb_comes_whole(proxy: Proxy) -> None:
    files = [("file", ("flat.png", small_picture()))] * NUM_IMAGES
    answer = proxy.client.post("/v1/encode", files=files)
    assert len(images_of(answer)) == NUM_IMAGES
    tensors: dict[str, Any] = dict(safetensors.deserialize(answer.content))
    tokens = np.frombuffer(tensors["embeddings"]["data"], np.float32).reshape(NUM_IMAGES, TOKENS, HIDDEN)
    assert tokens.nbytes == 58_720_256 and np.isfinite(tokens).all()
    np.testing.assert_allclose(tokens, np.broadcast_to(tokens[0], tokens.shape), atol=1e-4)


def test_an_answer_that_nobody_reads_is_cut_off_by_the_service(proxy: Proxy, service: RunningService) -> None:
    files = [("file", ("flat.png", small_picture()))] * NUM_IMAGES
    with proxy.client.stream("POST", "/v1/encode", files=files) as answer:
        assert answer.status_code == 200
        wait_until(lambda: service.client.get("/v1/capacity").json()["in_flight"]["bytes"] == 0, timeout_s=4 * STALL_S)
        with pytest.raises(httpx.TransportError):
            answer.read()


def test_headers_full_of_geometry_come_through(proxy: Proxy) -> None:
    files = [("file", ("good.png", GOOD))] * HEADER_IMAGES
    answer = proxy.client.post("/v1/encode", files=files, headers={"Accept": "application/octet-stream"})
    assert answer.status_code == 200, answer.text
    assert len(json.loads(answer.headers["x-tpvision-images"])) == HEADER_IMAGES
    assert (
        len(answer.headers["metadata"]) + len(answer.headers["x-tpvision-images"]) > 5000
    )  # nginx takes 4,096 by default


def test_a_body_that_stalls_gets_the_services_408(proxy: Proxy) -> None:
    with proxy.connect() as client:
        client.sendall(b"POST /v1/encode HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nhalf")
        client.settimeout(4 * STALL_S)
        answer = client.recv(65536) + client.recv(65536)
    assert answer.startswith(b"HTTP/1.1 408 ") and b'"request_timeout"' in answer


def test_request_ids_go_through_and_metrics_do_not(proxy: Proxy) -> None:
    answer = proxy.client.post("/v1/encode", content=GOOD, headers={"X-Request-Id": "from-outside.7"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (200, "from-outside.7")
    assert proxy.client.get("/readyz").status_code == 200
    assert proxy.client.get("/metrics").status_code == 404


def hold(service: RunningService, seconds: float) -> None:
    """Nobody works for a while: every rank is stopped, and so is each that the service starts in its place."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        signal_ranks(service, signal.SIGSTOP)
        time.sleep(0.1)
    signal_ranks(service, signal.SIGCONT)


def signal_ranks(service: RunningService, number: signal.Signals) -> None:
    for rank in ranks_of(service):
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank, number)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_answer_that_takes_a_while_is_waited_for(proxy: Proxy, service: RunningService) -> None:
    """Envoy gives up after 15 s and nginx after 60 s, where they are not told otherwise."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        signal_ranks(service, signal.SIGSTOP)
        sent = pool.submit(proxy.client.post, "/v1/encode", content=GOOD)
        hold(service, {"nginx": 62, "envoy": 17}[proxy.name])
        assert not sent.done()
        assert sent.result(120).status_code == 200


def test_many_requests_of_one_client_at_a_time_are_refused_by_nginx(service: RunningService, tmp_path: Path) -> None:
    head = b"POST /v1/encode HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"  # and no body yet
    with running_proxy("nginx", behind=service.url, folder=tmp_path) as proxy, contextlib.ExitStack() as stack:
        for _ in range(NGINX_REQUESTS_OF_A_CLIENT):
            stack.enter_context(proxy.connect()).sendall(head)
        refused: list[httpx.Response] = []

        def is_refused() -> bool:
            answer = proxy.client.post("/v1/encode", content=GOOD)
            if answer.status_code == 429:
                refused.append(answer)
            return bool(refused)

        wait_until(is_refused, timeout_s=STALL_S)
        assert (error_code(refused[0]), refused[0].headers["retry-after"]) == ("overloaded", "1")
        assert "of one client" in refused[0].json()["error"]["message"]
        stack.close()
        wait_until(lambda: proxy.client.post("/v1/encode", content=GOOD).status_code == 200)


@pytest.mark.parametrize("name", NAMES)
def test_without_a_front_end_a_proxy_answers_in_the_services_words(name: str, tmp_path: Path) -> None:
    service = RunningService(["--model", str(GOLDEN / "tiny-k3-f32")]).wait_ready()
    with running_proxy(name, behind=service.url, folder=tmp_path) as proxy:
        assert service.stop() == 0
        started = time.monotonic()
        answer = proxy.client.post("/v1/encode", content=GOOD)
        assert time.monotonic() - started < 5
    assert (answer.status_code, error_code(answer), answer.headers["retry-after"]) == (503, "not_ready", "2")


def test_envoy_refuses_a_body_before_it_is_sent(service: RunningService, tmp_path: Path) -> None:
    with running_proxy("envoy", behind=service.url, folder=tmp_path) as proxy, proxy.connect() as client:
        head = f"POST /v1/encode HTTP/1.1\r\nHost: localhost\r\nContent-Length: {MAX_BODY_BYTES + 1}\r\n"
        client.sendall(head.encode() + b"Expect: 100-continue\r\n\r\n")
        client.settimeout(STALL_S)
        assert client.recv(65536).startswith(b"HTTP/1.1 413 ")
