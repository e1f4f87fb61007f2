"""One line for each request: what it says, what it never says, and that ids and traces go all the way."""

import json
import re
import socket
from typing import Any

import httpx
import pytest
from make_photograph import acceptance_picture
from running import GOLDEN, OWN_STAGES, RunningService, wait_until

MODEL = str(GOLDEN / "tiny-k3-f32")
SMALL = (GOLDEN / "images" / "rgb_64x48.png").read_bytes()
TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture(scope="module")
def service(start_service: Any) -> RunningService:
    started: RunningService = start_service(
        "--model", MODEL, "--capacities", "64,256", TPVISION_CAPACITY__ALLOW_OVERRIDE="any"
    )
    return started


def line_of(service: RunningService, answer: httpx.Response) -> dict[str, Any]:
    """The one line that tells of an answer."""
    request_id = answer.headers["x-request-id"]
    wait_until(lambda: any(line["id"] == request_id for line in service.requests))
    (line,) = [line for line in service.requests if line["id"] == request_id]
    return line


def test_a_line_says_what_became_of_a_request(service: RunningService) -> None:
    answer = service.encode(SMALL)
    line = line_of(service, answer)
    assert line["ms"] >= sum(line.pop("stages_ms").values()) > 0
    for changing in ("timestamp", "ms", "id", "trace_id", "span_id"):
        assert line.pop(changing)
    assert line == {
        "event": "request",
        "level": "info",
        "logger": "tpvision.http",
        "method": "POST",
        "route": "/v1/encode",
        "form": "safetensors",
        "status": 200,
        "bytes_in": len(SMALL),
        "bytes_out": len(answer.content),
        "client_gone": False,
        "policy": "refuse",
        "outcome": "fits",
        "num_images": 1,
        "patches": 24,
        "images": [
            {"size": [64, 48], "encoded": [64, 48], "patches": 24, "tier": 64, "frames": 1, "downscaled": False}
        ],
        "mode": "tp",
    }


def test_stage_times_are_those_of_the_answer(service: RunningService) -> None:
    answer = service.encode(SMALL)
    told = dict(part.split(";dur=") for part in answer.headers["server-timing"].split(", "))
    line = line_of(service, answer)
    assert list(line["stages_ms"]) == OWN_STAGES
    assert line["stages_ms"] == {stage: pytest.approx(float(ms), abs=0.002) for stage, ms in told.items()}


def test_a_downscaled_image_and_a_refused_one(service: RunningService) -> None:
    picture = acceptance_picture(560, 280)  # 800 patches
    line = line_of(service, service.encode(picture, oversize="downscale"))
    (image,) = line["images"]
    assert (line["policy"], line["outcome"], image["downscaled"]) == ("downscale", "downscaled", True)
    assert image["encoded"][0] < image["size"][0] == 560 and image["tier"] == 256
    line = line_of(service, service.encode(picture))
    assert (line["status"], line["code"], line["outcome"]) == (422, "too_many_patches", "refused")
    assert line["images"] == [{"size": [560, 280]}]
    assert line["error"] == {"patches": 800, "limit": 256, "downscaled_size": image["encoded"]}
    assert list(line["stages_ms"]) == ["receive", "header"]


def test_many_images_make_no_long_line(service: RunningService) -> None:
    answer = service.client.post("/v1/encode", files=[("file", ("x", SMALL))] * 60)
    line = line_of(service, answer)
    assert (line["num_images"], len(line["images"]), line["patches"]) == (60, 16, 60 * 24)
    assert len(json.dumps(line)) < 3000


def test_a_client_that_leaves_is_told_of(service: RunningService) -> None:
    with pytest.raises(httpx.TimeoutException):
        service.client.post(
            *("/v1/encode",),
            content=acceptance_picture(224, 224),
            params={"oversize": "refuse"},
            headers={"x-request-id": "left"},
            timeout=httpx.Timeout(5, read=0.001),
        )
    wait_until(lambda: any(line["id"] == "left" for line in service.requests))
    (line,) = [line for line in service.requests if line["id"] == "left"]
    assert (line["status"], line["code"], line["client_gone"]) == (499, "client_gone", True)


def test_a_request_that_is_broken_off_has_one_line(service: RunningService) -> None:
    before = len(service.requests)
    head = b"POST /v1/encode HTTP/1.1\r\nHost: x\r\nX-Request-Id: broken-%d\r\nTransfer-Encoding: chunked\r\n\r\n"
    for number, pieces in enumerate([[head % 0 + b"nonsense"], [head % 1, b"nonsense"]]):
        with socket.create_connection(("127.0.0.1", service.client.base_url.port or 0), timeout=10) as connection:
            for piece in pieces:
                connection.sendall(piece)
                if number:
                    wait_until(lambda: service.client.get("/livez").status_code == 200)
            assert connection.recv(2**16).startswith(b"HTTP/1.1 400")
    service.client.get("/v1/models")
    wait_until(lambda: service.requests[-1]["route"] == "/v1/models")
    told = [(line["status"], line["code"], line["client_gone"]) for line in service.requests[before:-1]]
    assert told == [(400, "invalid_request", False)] * 2
    assert service.requests[-2]["id"] == "broken-1"


def test_probes_are_not_told_of(service: RunningService) -> None:
    before = len(service.requests)
    for path in ("/livez", "/readyz", "/health", "/metrics"):
        service.client.get(path, headers={"x-request-id": "probe"})
        service.client.delete(path, headers={"x-request-id": "probe"})
    line_of(service, service.client.get("/v1/models"))
    assert len(service.requests) == before + 1


def test_nothing_of_the_clients_is_in_the_log(service: RunningService) -> None:
    secret = "sEcReT"
    service.client.get(f"/v1/models?api_key={secret}", headers={"authorization": f"Bearer {secret}"})
    service.client.get(f"/{secret}", headers={"x-request-id": f"{secret} {secret}", "user-agent": secret})
    service.client.post(f"/v1/encode?{secret}=1", content=SMALL)
    service.client.post("/v1/encode", content=secret.encode() * 100)
    service.client.post("/v1/embeddings", json={"input": secret, secret: secret})
    last = service.client.post("/v1/encode", json={"images": [f"https://{secret}.example/?{secret}"]})
    line_of(service, last)
    assert secret not in "".join(service.log)


@pytest.mark.parametrize("value", ["abc", "A.b_c:d-9", "x" * 128])
def test_a_request_id_is_kept(service: RunningService, value: str) -> None:
    answer = service.client.get("/v1/models", headers={"x-request-id": value})
    assert answer.headers["x-request-id"] == value
    assert line_of(service, answer)["route"] == "/v1/models"


@pytest.mark.parametrize("path", ["/docs", "/openapi.json"])
def test_the_documents_are_routes_too(service: RunningService, path: str) -> None:
    assert line_of(service, service.client.get(path))["route"] == path


@pytest.mark.parametrize("value", ["", "x" * 129, "a b", "a\tb", "é", '"', "a,b"])
def test_another_request_id_is_replaced(service: RunningService, value: str) -> None:
    answer = service.client.get("/v1/models", headers=[(b"x-request-id", value.encode("latin-1"))])
    assert re.fullmatch(r"[0-9a-f]{32}", answer.headers["x-request-id"])


def test_a_trace_goes_on(service: RunningService) -> None:
    sent = f"00-{TRACE_ID}-{SPAN_ID}-01"
    answer = service.client.get("/v1/models", headers={"traceparent": sent})
    version, trace_id, span_id, flags = answer.headers["traceparent"].split("-")
    assert (version, trace_id, flags) == ("00", TRACE_ID, "01")
    assert re.fullmatch(r"[0-9a-f]{16}", span_id) and span_id != SPAN_ID
    line = line_of(service, answer)
    assert (line["trace_id"], line["span_id"]) == (TRACE_ID, span_id)


@pytest.mark.parametrize("sent", [None, "", f"00-{'0' * 32}-{SPAN_ID}-01", f"00-{TRACE_ID}-{SPAN_ID}-01, x"])
def test_without_a_valid_one_a_trace_begins(service: RunningService, sent: str | None) -> None:
    answer = service.client.get("/v1/nothing", headers={} if sent is None else {"traceparent": sent})
    found = re.fullmatch(r"00-([0-9a-f]{32})-([0-9a-f]{16})-00", answer.headers["traceparent"])
    assert found and found[1] != TRACE_ID
    assert line_of(service, answer)["trace_id"] == found[1]


def test_every_line_of_the_front_end_is_an_object(service: RunningService) -> None:
    for line in service.log:
        content = json.loads(line)
        assert {"event", "level", "logger", "timestamp"} <= content.keys()
