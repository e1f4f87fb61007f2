"""The Python client, against a real service, and against a server that answers as it is told to."""

import asyncio
import base64
import contextlib
import io
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from running import GOLDEN, ROOT, RunningService, images_of, ranks_of, wait_until

from service import errors
from service.client import (
    AsyncClient,
    Client,
    DeadlinePassed,
    Embedding,
    Geometry,
    UnexpectedAnswer,
    Unreachable,
)
from service.schemas import ImageGeometry

IMAGES = GOLDEN / "images"
GOOD = IMAGES / "rgb_64x48.png"


KEY = "only-for-this-test"


@pytest.fixture(scope="module")
def keyed(start_service: Any, tmp_path_factory: pytest.TempPathFactory) -> RunningService:
    """With a key, and room for four pictures of 256 patches at once."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(KEY)
    options = ("--model", str(GOLDEN / "tiny-k3-f32"), "--capacities", "256")
    service: RunningService = start_service(*options, TPVISION_SERVER__API_KEYS_FILE=str(keys))
    return service


@pytest.fixture(scope="module")
def client(tiny_k3: RunningService) -> Iterator[Client]:
    with Client(tiny_k3.url, trust_env=False) as opened:
        yield opened


def test_an_embedding_is_what_the_service_sent(client: Client, tiny_k3: RunningService) -> None:
    answer = tiny_k3.encode(GOOD.read_bytes())
    expected = safetensors.torch.load(answer.content)["embeddings"]
    embedding = client.encode(GOOD)
    assert torch.equal(embedding.torch(), expected)
    assert np.array_equal(embedding.numpy(), expected.numpy())
    (image,) = images_of(answer)
    for field in fields(Geometry):
        value = getattr(embedding.geometry, field.name)
        assert (list(value) if isinstance(value, tuple) else value) == image[field.name]
    assert embedding.model == "tiny-k3-f32"
    assert embedding.stages_ms["forward"] > 0


def test_the_geometry_is_the_services() -> None:
    assert {field.name for field in fields(Geometry)} == set(ImageGeometry.model_fields) - {"start", "end"}


def test_bfloat16_loses_nothing(tiny_k3_bf16: RunningService) -> None:
    expected = safetensors.torch.load(tiny_k3_bf16.encode(GOOD.read_bytes()).content)["embeddings"]
    with Client(tiny_k3_bf16.url, trust_env=False) as client:
        embedding = client.encode(GOOD)
        half = client.encode(GOOD, dtype="float16")
    assert embedding.torch().dtype == torch.bfloat16
    assert torch.equal(embedding.torch(), expected)
    assert embedding.numpy().dtype == np.float32
    assert np.array_equal(embedding.numpy(), expected.float().numpy())
    assert (half.numpy().dtype, half.torch().dtype) == (np.float16, torch.float16)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_vllms_part_holds_the_tensor(tiny_k3_bf16: RunningService, dtype: Any) -> None:
    with Client(tiny_k3_bf16.url, trust_env=False) as client:
        embedding = client.encode(GOOD, dtype=dtype)
        pooled = client.encode(GOOD, pooled=True)
    part = json.loads(json.dumps(embedding.vllm_part("sku-1")))
    assert (part["type"], part["uuid"]) == ("image_embeds", "sku-1")
    data = base64.b64decode(part["image_embeds"], validate=True)
    found = torch.load(io.BytesIO(data), weights_only=True)  # as vLLM does
    assert (found.dtype, found.ndim) == (getattr(torch, dtype), 2)
    assert torch.equal(found, embedding.torch())
    assert len(data) < found.nbytes + 4096
    assert set(embedding.vllm_part()) == {"type", "image_embeds"}
    with pytest.raises(ValueError, match="pooled"):
        pooled.vllm_part()


def test_arrays_and_tensors_may_be_written_to(client: Client) -> None:
    embedding = client.encode(GOOD)
    embedding.numpy()[0, 0] = 5
    embedding.torch()[0, 1] = 6


def test_pooled_is_one_vector(client: Client) -> None:
    tokens = client.encode(GOOD).numpy()
    pooled = client.encode(GOOD, pooled=True, normalize=True)
    assert pooled.shape == (tokens.shape[1],)
    assert pooled.geometry.num_tokens == len(tokens)
    mean = tokens.mean(0)
    assert np.allclose(pooled.numpy(), mean / np.linalg.norm(mean), atol=1e-6)


@pytest.mark.parametrize("path", sorted(IMAGES.glob("*.png")), ids=lambda path: path.stem)
def test_a_picture_in_memory_is_the_file(client: Client, path: Path) -> None:
    expected = client.encode(path).numpy()
    assert np.array_equal(client.encode(path.read_bytes()).numpy(), expected)
    with Image.open(path) as image:
        assert np.array_equal(client.encode(image).numpy(), expected)


def test_the_orientation_of_a_picture_in_memory_is_kept(keyed: RunningService) -> None:
    path = IMAGES / "exif6_90x50.jpg"
    with Client(keyed.url, api_key=KEY, trust_env=False) as client, Image.open(path) as image:
        expected, found = client.encode(path), client.encode(image)
    assert expected.geometry.original_size == found.geometry.original_size == (50, 90)
    assert np.array_equal(found.numpy(), expected.numpy())


@pytest.mark.parametrize(("name", "mode"), [("rgb_64x48", "RGB"), ("rgba_120x90", "RGBA"), ("gray_70x45", "L")])
def test_an_array_is_the_picture(client: Client, name: str, mode: str) -> None:
    path = IMAGES / f"{name}.png"
    with Image.open(path) as image:
        assert image.mode == mode
        array = np.asarray(image)
    assert np.array_equal(client.encode(array).numpy(), client.encode(path).numpy())


def test_an_array_of_16_bit_grey_is_the_picture(client: Client) -> None:
    path = IMAGES / "gray16_40x56.png"
    with Image.open(path) as image:
        array = np.asarray(image).astype(np.uint16)
    assert np.array_equal(client.encode(array).numpy(), client.encode(path).numpy())


@pytest.mark.parametrize(
    "array", [np.zeros((4, 4), np.float32), np.zeros((3, 4, 5), np.uint8), np.zeros(4, np.uint8)], ids=str
)
def test_an_array_that_is_no_picture_is_told_so(client: Client, array: np.ndarray[Any, Any]) -> None:
    with pytest.raises(ValueError, match="is no picture"):
        client.encode(array)


def test_a_picture_without_a_png_form_is_told_so(client: Client) -> None:
    with pytest.raises(ValueError, match="CMYK"):
        client.encode(Image.new("CMYK", (4, 4)))


def test_a_missing_file_is_an_os_error(client: Client) -> None:
    with pytest.raises(FileNotFoundError):
        client.encode("nowhere.png")


def test_a_batch_comes_in_order_with_errors_in_their_places(client: Client, tiny_k3: RunningService) -> None:
    pictures = [GOOD, b"no image", IMAGES / "one_1x1.png", "nowhere.png", GOOD]
    outcomes = list(client.encode_batch(pictures, concurrency=2, pooled=True))
    kinds = [Embedding, errors.UnsupportedImage, Embedding, FileNotFoundError, Embedding]
    assert [type(outcome) for outcome in outcomes] == kinds

    async def encode() -> list[Any]:
        async with AsyncClient(tiny_k3.url, trust_env=False) as other:
            return [outcome async for outcome in other.encode_batch(pictures, concurrency=2, pooled=True)]

    for one, other in zip(outcomes, asyncio.run(encode()), strict=True):
        assert type(one) is type(other)
        assert not isinstance(one, Embedding) or np.array_equal(one.numpy(), other.numpy())


def test_a_batch_takes_no_more_pictures_than_are_in_work(client: Client) -> None:
    taken = 0

    def endless() -> Iterator[Path]:
        nonlocal taken
        for taken in itertools.count(1):  # noqa: B007 - the test reads it
            yield GOOD

    outcomes = client.encode_batch(endless(), concurrency=3)
    for received in range(1, 5):
        assert isinstance(next(outcomes), Embedding)
        assert taken <= received + 3
    outcomes.close()  # type: ignore[attr-defined]


def test_the_client_works_inside_a_running_loop_and_from_threads(client: Client) -> None:
    async def encode() -> Embedding:
        return client.encode(GOOD)

    found = [asyncio.run(encode()).numpy()]
    threads = [threading.Thread(target=lambda: found.append(client.encode(GOOD).numpy())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 5
    assert all(np.allclose(one, found[0], atol=1e-5) for one in found)


def test_a_client_says_so_when_its_process_was_forked(client: Client) -> None:
    code = """
import os, sys
from service.client import Client
client = Client("http://127.0.0.1:9")
if pid := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
try:
    client.encode(b"x")
except RuntimeError as error:
    os._exit(0 if "fork" in str(error) else 1)
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"GIF89a", errors.UndecodableImage),
        (b"%PDF-1.7", errors.UnsupportedImage),
        (b"", errors.InvalidRequest),
    ],
)
def test_the_services_errors_keep_their_class(client: Client, content: bytes, kind: type[errors.ServiceError]) -> None:
    with pytest.raises(kind) as caught:
        client.encode(content)
    assert caught.value.code == kind.code
    assert "x-request-id" in caught.value.__notes__[0]


def test_errors_keep_their_numbers(client: Client) -> None:
    with pytest.raises(errors.TooManyPatches) as caught:
        client.encode(Image.new("L", (1960, 1960)))
    assert caught.value.numbers["patches"] > caught.value.numbers["limit"] == 16384
    assert caught.value.param == "images[0]"


@pytest.mark.parametrize("cls", sorted(errors.BY_CODE.values(), key=lambda cls: cls.code), ids=lambda cls: cls.code)
def test_every_error_is_read_back(cls: type[errors.ServiceError]) -> None:
    sent = cls("a message", param="images[1]", numbers={"limit": 5})
    found = errors.read_error(json.loads(json.dumps(sent.as_dict())), retry_after_s=3)
    assert type(found) is cls
    assert (found.message, found.param, found.numbers, found.retry_after_s) == (
        *("a message", "images[1]", {"limit": 5}),
        3,
    )


@pytest.mark.parametrize("body", [None, [], {}, {"error": "x"}, {"error": {}}, {"error": {"code": "of_tomorrow"}}])
def test_what_is_no_error_of_ours_is_none(body: Any) -> None:
    assert errors.read_error(body) is None


def test_an_unknown_option_is_the_services_to_refuse(client: Client) -> None:
    with pytest.raises(errors.InvalidRequest, match="colour"):
        client.encode(GOOD, colour="red")  # type: ignore[call-arg]


def test_a_key_is_sent(keyed: RunningService) -> None:
    with (
        Client(keyed.url, api_key=KEY, trust_env=False) as client,
        Client(keyed.url, trust_env=False) as stranger,
    ):
        assert client.model().dimensions == 128
        with pytest.raises(errors.Unauthorized):
            stranger.model()


def test_it_needs_nothing_but_httpx_and_numpy(tiny_k3: RunningService) -> None:
    code = f"""
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        ours = ("service", "service.client", "service.errors")
        blocked = ("torch fastapi starlette PIL pydantic uvicorn orjson yaml rich safetensors ml_dtypes tp").split()
        if name.split(".")[0] in blocked or (name.startswith("service") and name not in ours):
            raise ImportError("blocked: " + name)

sys.meta_path.insert(0, Block())
from service.client import Client
with Client({tiny_k3.url!r}, trust_env=False) as client:
    print(client.encode({str(GOOD)!r}).numpy().shape)
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.stdout.strip(), ended.stderr) == ("(6, 128)", "")


# What follows is told to a server that answers as a script says: proxies, and a service at its limits.


class Scripted:
    """Answers each request with the next step of a script, the last one for ever; counts and times the requests."""

    def __init__(self, steps: Sequence[Callable[[BaseHTTPRequestHandler], None]]) -> None:
        self.arrived_s: list[float] = []
        scripted = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                scripted.arrived_s.append(time.monotonic())
                self.rfile.read(int(self.headers["content-length"]))
                steps[min(len(scripted.arrived_s), len(steps)) - 1](self)

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def num_requests(self) -> int:
        return len(self.arrived_s)

    def __enter__(self) -> "Scripted":
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


Step = Callable[[BaseHTTPRequestHandler], None]


def answers(status: int, body: bytes, **headers: str) -> Step:
    def step(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in {"content-length": str(len(body)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return step


def refuses(cls: type[errors.ServiceError], retry_after: str | None = None) -> Step:
    headers = {} if retry_after is None else {"retry_after": retry_after}
    return answers(cls.status, json.dumps(cls("no").as_dict()).encode(), **headers)


def hangs_up(handler: BaseHTTPRequestHandler) -> None:
    handler.close_connection = True


def breaks_off(handler: BaseHTTPRequestHandler) -> None:
    answers(200, b"x", content_length="100")(handler)
    handler.close_connection = True


def trickles(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("content-length", "1000")
    handler.end_headers()
    with contextlib.suppress(OSError):
        for _ in range(1000):
            handler.wfile.write(b"x")
            time.sleep(0.05)


@pytest.fixture(scope="module")
def good_answer(tiny_k3: RunningService) -> Step:
    return answers(200, tiny_k3.encode(GOOD.read_bytes()).content)


def encode(url: str, **options: Any) -> Embedding:
    with Client(url, trust_env=False, **options) as client:
        return client.encode(b"anything")


@pytest.mark.parametrize("cls", [errors.Overloaded, errors.NotReady, errors.WorkersLost])
def test_retry_after_is_obeyed(cls: type[errors.ServiceError], good_answer: Step) -> None:
    with Scripted([refuses(cls, "1"), good_answer]) as server:
        assert encode(server.url).shape == (6, 128)
        first, second = server.arrived_s
    assert 1.0 <= second - first < 3.0


def test_retry_after_may_be_a_date(good_answer: Step) -> None:
    with Scripted([answers(503, b"", retry_after="Thu, 01 Jan 2026 00:00:00 GMT"), good_answer]) as server:
        assert encode(server.url).shape == (6, 128)
        assert server.num_requests == 2


def test_a_wait_past_the_deadline_is_not_begun() -> None:
    with Scripted([refuses(errors.Overloaded, "60")]) as server:
        started = time.monotonic()
        with pytest.raises(errors.Overloaded) as caught:
            encode(server.url, deadline_s=5)
        assert time.monotonic() - started < 3
        assert caught.value.retry_after_s == 60
        assert server.num_requests == 1


@pytest.mark.parametrize("step", [hangs_up, breaks_off, answers(502, b"<html>"), answers(429, b"")])
def test_what_breaks_on_the_way_is_repeated(step: Step, good_answer: Step) -> None:
    with Scripted([step, good_answer]) as server:
        assert encode(server.url).shape == (6, 128)
        assert server.num_requests == 2


@pytest.mark.parametrize(
    "cls",
    [
        errors.InvalidRequest,
        errors.UndecodableImage,
        errors.InternalError,
        errors.EncodeFailed,
        errors.DeadlineExceeded,
        errors.RequestTimeout,
    ],
)
def test_what_would_fail_again_is_not_repeated(cls: type[errors.ServiceError]) -> None:
    with Scripted([refuses(cls)]) as server:
        with pytest.raises(cls):
            encode(server.url)
        assert server.num_requests == 1


def test_nothing_is_repeated_where_that_is_not_wanted() -> None:
    with Scripted([refuses(errors.Overloaded, "0")]) as server:
        with pytest.raises(errors.Overloaded):
            encode(server.url, retry=False)
        assert server.num_requests == 1


@pytest.mark.parametrize("step", [answers(404, b"<html>"), answers(504, b""), answers(200, b"<html>")])
def test_another_servers_answer_is_told_apart(step: Step) -> None:
    with Scripted([step]) as server:
        with pytest.raises(UnexpectedAnswer):
            encode(server.url)
        assert server.num_requests == 1


@pytest.mark.parametrize("step", [trickles, refuses(errors.NotReady, "0")])
def test_the_deadline_holds_whatever_the_server_does(step: Step) -> None:
    with Scripted([step]) as server:
        started = time.monotonic()
        with pytest.raises((DeadlinePassed, errors.NotReady)):
            encode(server.url, deadline_s=0.6)
        assert time.monotonic() - started < 2


def test_closing_gives_up_what_is_under_way() -> None:
    with Scripted([trickles]) as server:
        client = Client(server.url, trust_env=False)
        outcomes = client.encode_batch(itertools.repeat(b"anything", 3), concurrency=2)
        with ThreadPoolExecutor() as threads:
            waiting = threads.submit(lambda: list(outcomes))
            wait_until(lambda: server.num_requests == 2)
            client.close()
            client.close()
            with pytest.raises(CancelledError):
                waiting.result(5)


def test_nobody_there_is_unreachable() -> None:
    with pytest.raises(Unreachable):
        encode("http://127.0.0.1:9", deadline_s=1)
    with pytest.raises(ValueError, match="http"):
        Client("127.0.0.1:8000")


def test_an_overloaded_service_answers_everybody_in_the_end(keyed: RunningService) -> None:
    pictures = itertools.repeat(np.zeros((224, 224), np.uint8), 12)
    with Client(keyed.url, api_key=KEY, trust_env=False) as client, ThreadPoolExecutor(1) as threads:
        for pid in ranks_of(keyed):
            os.kill(pid, signal.SIGSTOP)
        outcomes = threads.submit(lambda: list(client.encode_batch(pictures, concurrency=12, pooled=True)))
        try:
            wait_until(lambda: any("overloaded" in line for line in keyed.log))
        finally:
            for pid in ranks_of(keyed):
                os.kill(pid, signal.SIGCONT)
        assert [type(outcome) for outcome in outcomes.result()] == [Embedding] * 12
