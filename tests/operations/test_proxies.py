"""nginx and Envoy with our configurations: what is large goes through, and every refusal is the service's own."""

import concurrent.futures
import io
import json
import os
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
from make_photograph import acceptance_picture
from PIL import Image
from proxies import NAMES, Proxy
from running import GOLDEN, RunningService, images_of, ranks_of, wait_until

pytestmark = pytest.mark.operations

MAX_BODY_BYTES = 64 * 2**20
STALL_S = 4
GOOD = (GOLDEN / "images" / "rgb_64x48.png").read_bytes()
NUM_IMAGES, TOKENS, HIDDEN = 448, 256, 128  # float32: 58,720,256 bytes of embeddings, as one full tier of K3
HEADER_IMAGES = 15  # the most whose geometry goes into headers of 7,000 bytes


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    limits = {"max_images_per_request": NUM_IMAGES, "body_timeout_s": STALL_S, "send_timeout_s": STALL_S}
    environ = {f"TPVISION_LIMITS__{name}".upper(): str(value) for name, value in limits.items()}
    environ["TPVISION_CAPACITY__SLAB_PATCHES"] = str(NUM_IMAGES * TOKENS * 4)
    arguments = ["--model", str(GOLDEN / "tiny-k3-f32"), "--capacities", "1024,4096", "--policy", "downscale"]
    service = RunningService(arguments, environ).wait_ready()
    yield service
    assert service.stop() == 0


@pytest.fixture(scope="module", params=NAMES)
def proxy(
    request: pytest.FixtureRequest, service: RunningService, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Proxy]:
    proxy = Proxy(request.param, behind=service.url, folder=tmp_path_factory.mktemp(request.param))
    yield proxy
    proxy.stop()


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
    assert len(answer.headers["metadata"]) + len(answer.headers["x-tpvision-images"]) > 8192


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


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_answer_that_takes_a_while_is_waited_for(proxy: Proxy, service: RunningService) -> None:
    """Envoy gives up after 15 s and nginx after 60 s, where they are not told otherwise."""
    (rank,) = ranks_of(service)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        os.kill(rank, signal.SIGSTOP)
        try:
            sent = pool.submit(proxy.client.post, "/v1/encode", content=GOOD)
            concurrent.futures.wait([sent], timeout={"nginx": 62, "envoy": 17}[proxy.name])
            assert not sent.done()
        finally:
            os.kill(rank, signal.SIGCONT)
        assert sent.result(60).status_code == 200


def test_many_requests_of_one_client_at_a_time_are_refused_by_nginx(service: RunningService, tmp_path: Path) -> None:
    proxy = Proxy("nginx", behind=service.url, folder=tmp_path)
    large = acceptance_picture(896, 896)
    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        answers = list(pool.map(lambda _: proxy.client.post("/v1/encode", content=large), range(40)))
    proxy.stop()
    refused = [answer for answer in answers if answer.status_code == 429]
    assert 200 in {answer.status_code for answer in answers}
    assert refused and {error_code(answer) for answer in refused} == {"overloaded"}
    assert {answer.headers["retry-after"] for answer in refused} == {"1"}


@pytest.mark.parametrize("name", NAMES)
def test_without_a_front_end_a_proxy_answers_in_the_services_words(name: str, tmp_path: Path) -> None:
    service = RunningService(["--model", str(GOLDEN / "tiny-k3-f32")]).wait_ready()
    proxy = Proxy(name, behind=service.url, folder=tmp_path)
    assert service.stop() == 0
    started = time.monotonic()
    answer = proxy.client.post("/v1/encode", content=GOOD)
    assert time.monotonic() - started < 5
    assert (answer.status_code, error_code(answer)) == (503, "not_ready")
    proxy.stop()


def test_envoy_refuses_a_body_before_it_is_sent(service: RunningService, tmp_path: Path) -> None:
    proxy = Proxy("envoy", behind=service.url, folder=tmp_path)
    with proxy.connect() as client:
        head = f"POST /v1/encode HTTP/1.1\r\nHost: localhost\r\nContent-Length: {MAX_BODY_BYTES + 1}\r\n"
        client.sendall(head.encode() + b"Expect: 100-continue\r\n\r\n")
        client.settimeout(STALL_S)
        assert client.recv(65536).startswith(b"HTTP/1.1 413 ")
    proxy.stop()
