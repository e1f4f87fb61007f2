"""Hand-offs to LLM engines through a real service, read as the engines read them."""

import base64
import io
import json
import pickle
import socket
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import httpx
import pytest
import safetensors.torch
import torch
import zmq
from running import GOLDEN, RunningService, assert_balanced, images_of, wait_until

IMAGES = GOLDEN / "images"
FIRST, SECOND = ((IMAGES / f"{name}.png").read_bytes() for name in ("rgb_64x48", "gray_70x45"))
KEY = "only-for-this-test"
TIMEOUT_S = 1.0


@dataclass
class Handing:
    """A service with both hand-offs, and the folder of the one."""

    service: RunningService
    folder: Path

    def store(self, content: bytes, *ids: str, **options: Any) -> httpx.Response:
        return self.service.client.post("/v1/encoder_cache", content=content, params={"id": ids, **options})

    def expected(self, *pictures: bytes) -> torch.Tensor:
        """What /v1/encode answers."""
        files = [("file", picture) for picture in pictures]
        answer = self.service.client.post("/v1/encode", files=files)
        assert answer.status_code == 200, answer.text
        return safetensors.torch.load(answer.content)["embeddings"]


def start(start_service: Any, folder: Path, model: str, **environ: str) -> Handing:
    handoff = {
        "TPVISION_HANDOFF__VLLM_ENCODER_CACHE_DIR": str(folder),
        "TPVISION_HANDOFF__SGLANG_RECEIVERS": "127.0.0.0/8,localhost",
        "TPVISION_HANDOFF__TIMEOUT_S": str(TIMEOUT_S),
    }
    return Handing(
        start_service("--model", str(GOLDEN / model), "--capacities", "256", **{**handoff, **environ}), folder
    )


@pytest.fixture(scope="module", params=["tiny-k3-f32", "tiny-k3-bf16"])
def handing(request: pytest.FixtureRequest, start_service: Any, tmp_path_factory: pytest.TempPathFactory) -> Handing:
    return start(start_service, tmp_path_factory.mktemp("cache"), request.param)


def vllm_loads(folder: Path, name: str) -> torch.Tensor:
    """As ECExampleConnector does."""
    return safetensors.torch.load_file(folder / name / "encoder_cache.safetensors")["ec_cache"]


def test_vllm_finds_each_image_under_its_id(handing: Handing) -> None:
    files = [("file", FIRST), ("file", SECOND)]
    answer = handing.service.client.post("/v1/encoder_cache", files=files, params={"id": ["first", "lora:0a.b_c-1"]})
    assert answer.status_code == 200, answer.text
    images = answer.json()["images"]
    expected = handing.expected(FIRST, SECOND)
    for name, image in zip(("first", "lora:0a.b_c-1"), images, strict=True):
        found = vllm_loads(handing.folder, name)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected[image["start"] : image["end"]])
    assert images == images_of(handing.service.client.post("/v1/encode", files=files))
    assert answer.json()["dtype"] == str(expected.dtype).removeprefix("torch.")


def test_a_file_is_replaced_whole_and_may_be_read_by_others(handing: Handing) -> None:
    for picture in (FIRST, SECOND):
        assert handing.store(picture, "again", dtype="float16").status_code == 200
    assert torch.equal(vllm_loads(handing.folder, "again"), handing.expected(SECOND).half())
    (file,) = (handing.folder / "again").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) & 0o044


def test_many_writers_of_one_id_leave_one_whole_file(handing: Handing) -> None:
    pictures = [FIRST, SECOND] * 4
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda picture: handing.store(picture, "busy"), pictures))
    assert {answer.status_code for answer in answers} == {200}
    found = vllm_loads(handing.folder, "busy")
    assert any(found.shape == each.shape and torch.equal(found, each) for each in map(handing.expected, pictures[:2]))
    assert len(list((handing.folder / "busy").iterdir())) == 1


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".hidden", "a/b", "/etc", "a\\b", "..%2fa", "a\n", "a" * 129, "ä", "a b", "a\0"]
)
def test_an_id_is_one_plain_name(handing: Handing, name: str) -> None:
    before = sorted(handing.folder.rglob("*"))
    error = handing.store(FIRST, name).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_request", "id[0]")
    assert sorted(handing.folder.rglob("*")) == before


@pytest.mark.parametrize(("ids", "why"), [((), "id"), (("a", "b"), "2 ids for 1 images"), (("a", "a"), "one id")])
def test_each_image_needs_an_id_of_its_own(handing: Handing, ids: tuple[str, ...], why: str) -> None:
    answer = handing.store(FIRST, *ids)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "id")
    assert why in answer.json()["error"]["message"]


def test_vllm_gets_no_downscaled_image(start_service: Any, tmp_path: Path) -> None:
    handing = start(start_service, tmp_path, "tiny-k3-f32", TPVISION_CAPACITY__POLICY="downscale")
    large = (IMAGES / "pal_620x480.png").read_bytes()
    assert images_of(handing.service.encode(large))[0]["downscaled"]
    assert handing.store(large, "large").json()["error"]["code"] == "too_many_patches"
    assert handing.store(FIRST, "a", oversize="downscale").json()["error"]["param"] == "oversize"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_said(handing: Handing) -> None:
    (handing.folder / "taken").write_text("not a folder")
    answer = handing.store(FIRST, "taken")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "store_failed")
    assert str(handing.folder) not in answer.text
    wait_until(lambda: any("cannot be written" in line for line in handing.service.log))
    assert_balanced(handing.service)


class EmbeddingData:
    """Stands for SGLang's class."""

    def __init__(self, *_: Any) -> None:
        pytest.fail("unpickling calls no constructor")


Modality = Enum("Modality", ["IMAGE", "VIDEO", "AUDIO"])  # type: ignore[misc]


class Unpickler(pickle.Unpickler):
    """Knows what SGLang's allows, and nothing else."""

    ALLOWED = {  # noqa: RUF012
        ("sglang.srt.disaggregation.encoder.receiver", "EmbeddingData"): EmbeddingData,
        ("sglang.srt.managers.schedule_batch", "Modality"): Modality,
        ("torch", "bfloat16"): torch.bfloat16,
        ("torch", "float32"): torch.float32,
    }

    def find_class(self, module: str, name: str) -> Any:
        return self.ALLOWED[module, name]


class Receiver:
    """The socket of an SGLang server that waits for embeddings."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.rcvtimeo = 20_000
        self.host = address
        self.port = self._socket.bind_to_random_port(f"tcp://{address}")

    def receive(self) -> tuple[Any, torch.Tensor]:
        """One part, and its tensor, made as SGLang makes it."""
        frames = self._socket.recv_multipart(copy=False)
        assert len(frames) == 2
        part = Unpickler(io.BytesIO(frames[0].bytes)).load()
        return part, torch.frombuffer(frames[1].buffer, dtype=part.dtype).reshape(part.shape).clone()

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    opened = Receiver()
    yield opened
    opened.close()


def uri(picture: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(picture).decode()


def sglang_sends(
    receiver: Receiver, *items: Any, part_idx: int = 0, num_parts: int = 1, **others: Any
) -> dict[str, Any]:
    """The body of SGLang 0.5.23."""
    return {
        "encoder_idx": 0,
        "encoder_url": "http://127.0.0.1:1",
        "mm_items": list(items),
        "num_parts": num_parts,
        "part_idx": part_idx,
        "req_id": f"6f1c_local_part_{part_idx}",
        "modality": "IMAGE",
        "prefill_host": receiver.host,
        "embedding_port": receiver.port,
        "time_stats_json": None,
        **others,
    }


def test_sglang_receives_a_part(handing: Handing, receiver: Receiver) -> None:
    body = sglang_sends(receiver, uri(FIRST), {"url": uri(SECOND), "detail": "high", "content_hash": "00"})
    answer = handing.service.client.post("/encode", json=body)
    assert answer.status_code == 200, answer.text
    part, tensor = receiver.receive()
    assert type(part) is EmbeddingData
    expected = handing.expected(FIRST, SECOND)
    assert tensor.dtype == part.dtype == expected.dtype
    assert torch.equal(tensor, expected)
    images = answer.json()["images"]
    assert vars(part) == {
        "req_id": "6f1c_local_part_0",
        "num_parts": 1,
        "part_idx": 0,
        "grid_dim": [image["grid_thw"] for image in images],
        "modality": Modality.IMAGE,
        "shape": list(expected.shape),
        "dtype": expected.dtype,
        "original_image_sizes": [[64, 48], [70, 45]],
        **dict.fromkeys(("embedding", "send_time", "error_msg", "error_code", "_mr_ptr")),
    }
    assert torch.as_tensor(part.grid_dim).prod(1).sum() // 4 == len(tensor)


def test_parts_come_one_by_one_in_any_order(handing: Handing, receiver: Receiver) -> None:
    pictures = [FIRST, SECOND, FIRST]
    bodies = [sglang_sends(receiver, uri(each), part_idx=index, num_parts=3) for index, each in enumerate(pictures)]
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda body: handing.service.client.post("/encode", json=body), bodies))
    assert {answer.status_code for answer in answers} == {200}
    received = {part.part_idx: tensor for part, tensor in (receiver.receive() for _ in bodies)}
    assert all(torch.equal(received[index], handing.expected(each)) for index, each in enumerate(pictures))


def test_a_receiver_may_have_a_name(handing: Handing, receiver: Receiver) -> None:
    body = sglang_sends(receiver, uri(FIRST), prefill_host="LOCALHOST")
    assert handing.service.client.post("/encode", json=body).status_code == 200
    assert torch.equal(receiver.receive()[1], handing.expected(FIRST))


def test_other_towers_send_no_sizes(start_service: Any, tmp_path: Path, receiver: Receiver) -> None:
    handing = start(start_service, tmp_path, "tiny-k25-f32")
    assert handing.service.client.post("/encode", json=sglang_sends(receiver, uri(FIRST))).status_code == 200
    assert "original_image_sizes" not in vars(receiver.receive()[0])


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prefill_host": "169.254.169.254"}, "prefill_host"),
        ({"prefill_host": "example.org"}, "prefill_host"),
        ({"prefill_host": "localhost.example.org"}, "prefill_host"),
        ({"prefill_host": "::1"}, "prefill_host"),
        ({"prefill_host": "::ffff:127.0.0.1"}, "prefill_host"),
        ({"prefill_host": "127.1"}, "prefill_host"),
        ({"prefill_host": "127.0.0.1;10.0.0.1"}, "prefill_host"),
        ({"prefill_host": "localhost\0"}, "prefill_host"),
        ({"prefill_host": ""}, "prefill_host"),
        ({"prefill_host": None}, "prefill_host"),
        ({"embedding_port": None}, "embedding_port"),
        ({"embedding_port": 22}, "embedding_port"),
        ({"embedding_port": 65536}, "embedding_port"),
        ({"embedding_port": [2000]}, "embedding_port"),
        ({"num_parts": 0}, "num_parts"),
        ({"num_parts": True}, "num_parts"),
        ({"part_idx": 1}, "part_idx"),
        ({"part_idx": -1}, "part_idx"),
        ({"req_id": ""}, "req_id"),
        ({"modality": "VIDEO"}, "modality"),
        ({"mm_items": []}, "mm_items"),
        ({"mm_items": ["file:///etc/hostname"]}, "mm_items[0]"),
        ({"mm_items": ["/etc/hostname"]}, "mm_items[0]"),
        ({"mm_items": [uri(FIRST), {"url": 3}]}, "mm_items[1].url"),
        ({"mm_items": [uri(FIRST), uri(b"no image")]}, "mm_items[1]"),
    ],
)
def test_what_sglang_may_not_send(handing: Handing, receiver: Receiver, changes: dict[str, Any], param: str) -> None:
    answer = handing.service.client.post("/encode", json={**sglang_sends(receiver, uri(FIRST)), **changes})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (415 if param == "mm_items[1]" else 400, param)
    assert answer.json()["message"] == error["message"]  # where SGLang looks


def test_a_receiver_that_is_not_there_is_waited_for_no_longer_than_set(handing: Handing, receiver: Receiver) -> None:
    receiver.close()
    answer = handing.service.client.post("/encode", json=sglang_sends(receiver, uri(FIRST)))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["limit_s"]) == (422, "push_failed", TIMEOUT_S)
    assert TIMEOUT_S <= answer.elapsed.total_seconds() < 60
    assert_balanced(handing.service)
    assert handing.service.scrape().value("requests_total", route="/encode", code="push_failed") >= 1


def test_neither_an_absent_receiver_nor_a_silent_one_holds_up_a_drain(start_service: Any, tmp_path: Path) -> None:
    handing = start(
        *(start_service, tmp_path, "tiny-k3-f32"),
        TPVISION_HANDOFF__TIMEOUT_S="3600",
        TPVISION_LIMITS__DRAIN_TIMEOUT_S="0.5",
    )
    absent = Receiver()
    absent.close()

    def send(port: int) -> None:
        body = sglang_sends(absent, uri(FIRST), embedding_port=port)
        httpx.post(f"{handing.service.url}/encode", json=body, timeout=60, trust_env=False)

    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor(2) as pool:  # it speaks no ZeroMQ
        sent = [pool.submit(send, port) for port in (absent.port, silent.getsockname()[1])]
        pushed_bytes = 2 * handing.expected(FIRST).nbytes
        wait_until(lambda: handing.service.scrape().value("queue_bytes") == pushed_bytes)
        assert handing.service.stop() == 0
        assert [type(future.exception(20)) for future in sent] == [httpx.RemoteProtocolError] * 2


def test_a_client_that_leaves_ends_its_push(start_service: Any, tmp_path: Path) -> None:
    handing = start(start_service, tmp_path, "tiny-k3-f32", TPVISION_HANDOFF__TIMEOUT_S="3600")
    absent = Receiver()
    absent.close()
    body = json.dumps(sglang_sends(absent, uri(FIRST))).encode()
    url = httpx.URL(handing.service.url)
    with socket.create_connection((url.host, url.port)) as client:
        client.sendall(b"POST /encode HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        pushed_bytes = handing.expected(FIRST).nbytes
        wait_until(lambda: handing.service.scrape().value("queue_bytes") == pushed_bytes)
    wait_until(lambda: handing.service.scrape().value("requests_total", route="/encode", status="499") == 1)
    assert handing.service.scrape().value("queue_bytes") == 0
    assert_balanced(handing.service)


def test_a_hand_off_is_there_only_where_it_is_configured(tiny_k3: RunningService) -> None:
    paths = tiny_k3.client.get("/openapi.json").json()["paths"]
    for path in ("/encode", "/v1/encoder_cache"):
        assert path not in paths
        assert tiny_k3.client.post(path, content=FIRST).json()["error"]["code"] == "not_found"


def test_a_hand_off_needs_a_key_where_others_do(start_service: Any, tmp_path: Path, receiver: Receiver) -> None:
    keys = tmp_path / "keys"
    keys.write_text(KEY)
    handing = start(start_service, tmp_path, "tiny-k3-f32", TPVISION_SERVER__API_KEYS_FILE=str(keys))
    body = sglang_sends(receiver, uri(FIRST))
    assert handing.service.client.post("/encode", json=body).status_code == 401
    assert handing.store(FIRST, "a").status_code == 401
    handing.service.client.headers["authorization"] = f"Bearer {KEY}"
    assert handing.service.client.post("/encode", json=body).status_code == 200
    assert handing.store(FIRST, "a").status_code == 200


def test_the_log_tells_of_both_as_of_every_request(handing: Handing, receiver: Receiver) -> None:
    handing.store(FIRST, "logged")
    handing.service.client.post("/encode", json=sglang_sends(receiver, uri(FIRST)))
    wait_until(lambda: [line["route"] for line in handing.service.requests[-2:]] == ["/v1/encoder_cache", "/encode"])
    for line in handing.service.requests[-2:]:
        assert (line["status"], line["form"], line["num_images"], line["outcome"]) == (200, "json", 1, "fits")
        assert {"receive", "forward", "copy", "encode_response"} <= set(line["stages_ms"])
        assert not {"logged", "6f1c", receiver.host} & set(json.dumps(line).split('"'))
