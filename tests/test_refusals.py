"""Bad input over HTTP: each a 4xx of the error table that does not echo it, and the next good request works."""

import base64
import json
import struct
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from running import GOLDEN, RunningService

GOOD = (GOLDEN / "images" / "rgb_64x48.png").read_bytes()
GOOD_TEXT = base64.b64encode(GOOD).decode()


def big_tiff(width: int, height: int) -> bytes:
    """A header of 64-bit sizes, with no pixels behind it."""
    tags = [(256, 16, width), (257, 16, height), (258, 3, 8), (259, 3, 1), (262, 3, 1), (273, 16, 16), (279, 16, 1)]
    table = b"".join(struct.pack("<HHQQ", tag, kind, 1, value) for tag, kind, value in tags)
    return b"II+\0" + struct.pack("<HHQQ", 8, 0, 16, len(tags)) + table + bytes(8)


@pytest.fixture(autouse=True)
def still_works(tiny_k3: RunningService) -> Iterator[None]:
    before = tiny_k3.encode(GOOD).content
    yield
    after = tiny_k3.encode(GOOD)
    assert after.status_code == 200
    assert after.content[-3000:] == before[-3000:]


def refused(answer: httpx.Response, status: int, code: str, param: str | None = None) -> dict[str, Any]:
    error: dict[str, Any] = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code), error
    assert error["param"] == param
    assert set(error) >= {"message", "type", "param", "code"}
    assert len(answer.content) < 1000
    return error


@pytest.mark.parametrize(
    ("content", "status", "code", "param"),
    [
        (b"", 400, "invalid_request", None),
        (b"just some text", 415, "unsupported_image", "images[0]"),
        (b"%PDF-1.7 secret", 415, "unsupported_image", "images[0]"),
        (GOOD[: len(GOOD) // 2], 422, "undecodable_image", "images[0]"),
        (GOOD[:20], 422, "undecodable_image", "images[0]"),
        (big_tiff(2**40, 2**63), 422, "image_too_large", "images[0]"),
    ],
)
def test_bodies_that_are_no_image(tiny_k3: RunningService, content: bytes, status: int, code: str, param: str) -> None:
    error = refused(tiny_k3.encode(content), status, code, param)
    assert "secret" not in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ('{"images": [], "x": 1}', None),
        ("[]", None),
        ('{"images": []}', "images"),
        ("{}", "images"),
        ("null", None),
        ('{"images": [""]}', "images[0]"),
        ('{"images": [[]]}', "images[0]"),
        ('{"images": ["https://example.com/a.png"]}', "images[0]"),
        ('{"images": ["file:///etc/hostname"]}', "images[0]"),
        ('{"images": [{"type": "video_chunk", "frames": []}]}', "images[0].frames"),
        (json.dumps({"images": [GOOD_TEXT, {"type": "image", "data": GOOD_TEXT, "size": 3}]}), "images[1].size"),
        ("[" * 100000, None),
        ('{"images": [NaN]}', None),
    ],
)
def test_json_that_does_not_fit(tiny_k3: RunningService, body: str, param: str | None) -> None:
    answer = tiny_k3.client.post("/v1/encode", content=body, headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "invalid_request"), error
    if param is not None:
        assert error["param"] == param
    assert len(answer.content) < 1000


def test_a_binary_body_on_a_json_route(tiny_k3: RunningService) -> None:
    for path in ("/v1/encode", "/v1/embeddings"):
        answer = tiny_k3.client.post(path, content=GOOD, headers={"content-type": "application/json"})
        refused(answer, 400, "invalid_request")


def test_the_first_bad_image_of_several_is_named(tiny_k3: RunningService) -> None:
    contents = [GOOD, GOOD, GOOD, GOOD[:200], GOOD, GOOD[:100]]
    files = [("file", (f"{index}.png", content)) for index, content in enumerate(contents)]
    refused(tiny_k3.client.post("/v1/encode", files=files), 422, "undecodable_image", "images[3]")
    body = {"input": [GOOD_TEXT, base64.b64encode(b"no image at all").decode()]}
    refused(tiny_k3.client.post("/v1/embeddings", json=body), 415, "unsupported_image", "input[1]")


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("dtype=float64", "dtype"),
        ("output=all", "output"),
        ("colour=red", "colour"),
        ("normalize=perhaps", "normalize"),
        ("oversize=crop", "oversize"),
        ("encoding_format=hex", "encoding_format"),
    ],
)
def test_unknown_options(tiny_k3: RunningService, query: str, param: str) -> None:
    refused(tiny_k3.client.post(f"/v1/encode?{query}", content=GOOD), 400, "invalid_request", param)


def test_an_override_that_the_operator_does_not_allow(tiny_k3: RunningService) -> None:
    refused(tiny_k3.encode(GOOD, oversize="downscale"), 400, "invalid_request", "oversize")
    assert tiny_k3.encode(GOOD, oversize="refuse").status_code == 200


def test_an_unknown_form(tiny_k3: RunningService) -> None:
    answer = tiny_k3.client.post("/v1/encode", content=GOOD, headers={"accept": "text/html"})
    assert "application/vnd.safetensors" in refused(answer, 406, "not_acceptable")["message"]


def test_several_images_do_not_fit_npy(tiny_k3: RunningService) -> None:
    files = [("file", ("a.png", GOOD)), ("file", ("b.png", GOOD))]
    answer = tiny_k3.client.post("/v1/encode", files=files, headers={"accept": "application/x-npy"})
    refused(answer, 400, "too_many_images_for_form")


def test_more_geometry_than_headers_may_hold(tiny_k3: RunningService) -> None:
    files = [("file", (f"{index}.png", GOOD)) for index in range(40)]
    answer = tiny_k3.client.post("/v1/encode", files=files, headers={"accept": "application/octet-stream"})
    assert refused(answer, 400, "too_many_images_for_form")["limit"] == 7000
    assert tiny_k3.client.post("/v1/encode", files=files).status_code == 200


def test_too_many_images(tiny_k3: RunningService) -> None:
    answer = tiny_k3.client.post("/v1/encode", json={"images": [GOOD_TEXT] * 65})
    assert refused(answer, 422, "too_many_images", "images")["limit"] == 64
    files = [("file", (f"{index}.png", GOOD)) for index in range(65)]
    assert tiny_k3.client.post("/v1/encode", files=files).json()["error"]["code"] == "too_many_images"


def test_a_body_over_the_limit_declared_or_not(tiny_k3: RunningService) -> None:
    over = b"x" * (64 * 2**20 + 1)
    refused(tiny_k3.encode(over), 413, "body_too_large")
    chunks = (over[start : start + 2**20] for start in range(0, len(over), 2**20))
    refused(tiny_k3.client.post("/v1/encode", content=chunks), 413, "body_too_large")


def test_a_request_over_the_slab(start_service: Any) -> None:
    service = start_service(
        "--model", str(GOLDEN / "tiny-k3-f32"), "--capacities", "64", TPVISION_CAPACITY__SLAB_PATCHES="64"
    )
    files = [("file", (f"{index}.png", GOOD)) for index in range(3)]
    error = refused(service.client.post("/v1/encode", files=files), 422, "request_too_large")
    assert (error["patches"], error["limit"]) == (72, 64)
    answer = service.client.post("/v1/encode?output=tokens", content=GOOD, headers={"accept": "application/json"})
    assert answer.status_code == 200


def test_json_answers_have_a_cap(start_service: Any) -> None:
    service = start_service("--model", str(GOLDEN / "tiny-k3-f32"), TPVISION_LIMITS__MAX_JSON_BYTES="4000")
    answer = service.client.post("/v1/encode", content=GOOD, headers={"accept": "application/json"})
    assert refused(answer, 422, "response_too_large")["limit"] == 4000
    assert service.encode(GOOD).status_code == 200


def test_embeddings_of_another_width_or_model(tiny_k3: RunningService) -> None:
    answer = tiny_k3.client.post("/v1/embeddings", json={"input": GOOD_TEXT, "dimensions": 64})
    assert refused(answer, 400, "invalid_request", "dimensions")["dimensions"] == 128
    answer = tiny_k3.client.post("/v1/embeddings", json={"input": GOOD_TEXT, "model": "text-embedding-3-small"})
    refused(answer, 404, "model_not_found", "model")
    assert tiny_k3.client.post("/v1/embeddings", json={"input": GOOD_TEXT, "dimensions": 128}).status_code == 200


def test_unknown_routes_and_methods(tiny_k3: RunningService) -> None:
    refused(tiny_k3.client.get("/v2/encode"), 404, "not_found")
    refused(tiny_k3.client.get("/v1/encode"), 405, "method_not_allowed")


def test_keys_where_configured(start_service: Any, tmp_path: Any) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# the team's\nfirst-key\nsecond-key\n")
    service = start_service("--model", str(GOLDEN / "tiny-k3-f32"), TPVISION_SERVER__API_KEYS_FILE=str(keys))
    refused(service.encode(GOOD), 401, "unauthorized")
    wrong = service.client.post("/v1/encode", content=GOOD, headers={"authorization": "Bearer third-key"})
    assert wrong.headers["www-authenticate"] == "Bearer"
    refused(wrong, 401, "unauthorized")
    for key in ("first-key", "second-key"):
        headers = {"authorization": f"Bearer {key}"}
        assert service.client.post("/v1/encode", content=GOOD, headers=headers).status_code == 200
    assert service.client.get("/readyz").status_code == 200
    assert "first-key" not in "".join(service.log)
