"""The OpenAPI document is true: schemathesis finds no answer that it does not describe, and examples are what comes."""

import ast
import base64
import io
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import numpy as np
import pytest
from PIL import Image
from running import GOLDEN, ROOT, RunningService

from service import openapi_examples as examples
from service import schemas
from service.errors import BY_CODE

CHECKS = [
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
    "ignored_auth",
]
EXAMPLES_EACH = 100
KEY = "only-for-this-test"


@pytest.fixture(scope="module")
def service(start_service: Any, tmp_path_factory: pytest.TempPathFactory) -> RunningService:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(KEY)
    handoff = {
        "TPVISION_HANDOFF__VLLM_ENCODER_CACHE_DIR": str(tmp_path_factory.mktemp("cache")),
        "TPVISION_HANDOFF__SGLANG_RECEIVERS": "127.0.0.1",
        "TPVISION_HANDOFF__TIMEOUT_S": "0.5",
    }
    started: RunningService = start_service(
        *("--model", str(GOLDEN / "tiny-k3-f32"), "--tp", "2", "--policy", "downscale", "--capacities", "64,256"),
        TPVISION_SERVER__API_KEYS_FILE=str(keys),
        **handoff,
    )
    started.client.headers["authorization"] = f"Bearer {KEY}"
    return started


@pytest.fixture(scope="module")
def document(service: RunningService) -> dict[str, Any]:
    return service.client.get("/openapi.json").json()  # type: ignore[no-any-return]


def test_schemathesis_finds_nothing(service: RunningService, tmp_path: Path) -> None:
    num_lines = len(service.log)
    before = service.client.post("/v1/encode", content=(GOLDEN / "images" / "rgb_64x48.png").read_bytes())
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{service.url}/openapi.json"]
    options = ["--seed", "1", "--max-examples", str(EXAMPLES_EACH), "--phases", "examples,coverage,fuzzing"]
    options += ["--checks", ",".join(CHECKS), "--header", f"Authorization: Bearer {KEY}"]
    options += ["--no-shrink", "--continue-on-failure", "--request-timeout", "20", "--no-color", "--warnings", "off"]
    ended = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True, timeout=150, check=False)
    assert ended.returncode == 0, ended.stdout[-8000:] + ended.stderr[-2000:]
    found = re.search(r"(\d+) generated, \d+ passed", ended.stdout)
    assert found is not None and int(found[1]) > 500, ended.stdout[-2000:]
    after = service.client.post("/v1/encode", content=(GOLDEN / "images" / "rgb_64x48.png").read_bytes())
    assert after.content[-3000:] == before.content[-3000:]
    assert KEY not in "".join(service.log)
    assert not [line for line in service.log[num_lines:] if "Traceback" in line or len(line) > 2500]


def test_every_operation_documents_what_comes_before_it(document: dict[str, Any]) -> None:
    for methods in document["paths"].values():
        for operation in methods.values():
            assert {"400", "408", "431"} <= set(operation["responses"])


def test_keys_are_in_the_document_where_they_are_configured(tiny_k3: RunningService, document: dict[str, Any]) -> None:
    for path, methods in document["paths"].items():
        assert [operation.get("security") for operation in methods.values()] == [
            [{"key": []}] if path.startswith("/v1/") or path == "/encode" else None
        ]
    assert "securitySchemes" not in tiny_k3.client.get("/openapi.json").json()["components"]


def validate(document: dict[str, Any], schema: dict[str, Any], value: Any) -> None:
    """Raise unless `value` is an instance of a schema of the document."""
    jsonschema_rs.validate({**schema, "components": document["components"]}, value)


def media_types(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every body that the document describes, with its place."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            bodies = {"request": operation.get("requestBody", {}), **operation["responses"]}
            for status, body in bodies.items():
                for form, media in body.get("content", {}).items():
                    yield f"{method} {path} {status} {form}", media


def examples_of(document: dict[str, Any], media: dict[str, Any]) -> dict[str, Any]:
    shared = document["components"]["examples"]
    named = {
        name: shared[name] if "$ref" in example else example for name, example in media.get("examples", {}).items()
    }
    return {name: example["value"] for name, example in named.items()}


def test_every_example_is_an_instance_of_its_schema(document: dict[str, Any]) -> None:
    num_checked = 0
    for place, media in media_types(document):
        for name, value in examples_of(document, media).items():
            try:
                validate(document, media["schema"], value)
            except jsonschema_rs.ValidationError as error:
                pytest.fail(f"{place}, {name}: {error}")
            num_checked += 1
    assert num_checked > 100


def test_the_schemas_tell_a_wrong_example(document: dict[str, Any]) -> None:
    for model, value in (("EncodeBody", {"images": [{"type": "image"}]}), ("ErrorAnswer", {"error": {}})):
        with pytest.raises(jsonschema_rs.ValidationError):
            validate(document, {"$ref": f"#/components/schemas/{model}"}, value)


def test_every_body_but_of_bytes_and_probes_has_examples(document: dict[str, Any]) -> None:
    bare = {place for place, media in media_types(document) if not {"example", "examples"} & media.keys()}
    assert bare == {
        *(f"get /{probe} 200 application/json" for probe in ("livez", "readyz", "health", "v1/capacity")),
        "get /metrics 200 text/plain",
        *(f"post /v1/encode 200 {form}" for form in schemas.FORMS if not form.endswith("json")),
    }


def test_every_code_is_an_example_where_its_status_is_answered(document: dict[str, Any]) -> None:
    assert list(document["components"]["examples"]) == list(examples.ERRORS)
    assert examples.ERRORS.keys() == BY_CODE.keys()
    for path in ("encode", "embeddings"):
        responses = document["paths"][f"/v1/{path}"]["post"]["responses"]
        for code, error in BY_CODE.items():
            assert code in responses[str(error.status)]["content"]["application/json"]["examples"]


def as_documented(answer: Any, example: Any) -> Any:
    """The answer with the example's numbers, identity and width: what may differ from service to service."""
    vague = ("id", "created", "model", "dtype", "embedding", "shape", "dimensions")
    if isinstance(answer, dict) and isinstance(example, dict):
        return {
            key: example[key] if key in vague and key in example else as_documented(value, example.get(key))
            for key, value in answer.items()
        }
    if isinstance(answer, list) and isinstance(example, list):
        return [as_documented(*pair) for pair in itertools.zip_longest(answer, example)]
    return answer


def shape_of(answer: dict[str, Any]) -> list[str]:
    """How each embedding is written: the width is the model's."""
    items = answer["images"] if "embedding" in answer["images"][0] else answer["data"]
    kinds = []
    for item in items:
        value, rows = item["embedding"], item.get("shape", [1])[:-1]
        if isinstance(value, str):
            kinds.append(f"base64 {rows}")
        else:
            kinds.append(f"{len(value)} rows" if isinstance(value[0], list) else "vector")
    return kinds


def check_answer(answer: httpx.Response, example: dict[str, Any]) -> None:
    found = answer.json()
    assert answer.status_code == 200, answer.text
    assert as_documented(found, example) == example
    assert shape_of(found) == shape_of(example)


@pytest.mark.parametrize("name", examples.ENCODE_REQUESTS)
def test_an_encode_request_gives_the_documented_answer(tiny_k3: RunningService, name: str) -> None:
    body = examples.ENCODE_REQUESTS[name]["value"]
    answer = tiny_k3.client.post("/v1/encode", json=body, headers={"accept": "application/json"})
    if name == "several":
        assert [image["grid_thw"] for image in answer.json()["images"]] == [[1, 2, 2], [2, 2, 2]]
        return
    check_answer(answer, examples.ENCODE_ANSWERS["video_chunk" if name == "video_chunk" else "tokens"]["value"])


@pytest.mark.parametrize("name", ["tokens", "tokens_base64", "pooled", "pooled_base64"])
def test_a_raw_image_gives_the_documented_answers(tiny_k3: RunningService, name: str) -> None:
    example = examples.ENCODE_ANSWERS[name]
    query = example["summary"] if "=" in example["summary"] else ""
    raw = examples.RAW_REQUESTS["image"]["value"].encode()
    answer = tiny_k3.client.post(f"/v1/encode?{query}", content=raw, headers={"accept": "application/json"})
    check_answer(answer, example["value"])


def test_the_multipart_example_and_the_documented_headers(tiny_k3: RunningService, document: dict[str, Any]) -> None:
    texts = examples.MULTIPART_REQUESTS["files"]["value"]["file"]
    files = [("file", ("a.gif", text.encode())) for text in texts]
    answer = tiny_k3.client.post("/v1/encode", files=files, headers={"accept": "application/json"})
    assert [image["grid_thw"] for image in answer.json()["images"]] == [[1, 2, 2], [1, 2, 2]]
    raw = tiny_k3.client.post("/v1/encode", files=files[:1], headers={"accept": "application/octet-stream"})
    described = document["paths"]["/v1/encode"]["post"]["responses"]["200"]["headers"]
    assert json.loads(raw.headers["x-tpvision-images"]) == json.loads(described["x-tpvision-images"]["example"])
    metadata, example = json.loads(raw.headers["metadata"]), json.loads(described["metadata"]["example"])
    assert metadata["data"][0].pop("end") == 128 * 4 and example["data"][0].pop("end") == 4 * 4
    assert as_documented(metadata, example) == example
    stages = [
        re.findall(r"(\w+);dur=", text)
        for text in (raw.headers["server-timing"], described["server-timing"]["example"])
    ]
    assert stages[0] == stages[1]


def test_hand_offs_answer_as_documented(service: RunningService) -> None:
    raw = examples.RAW_REQUESTS["image"]["value"].encode()
    found = service.client.post("/v1/encoder_cache", content=raw, params={"id": "a"}).json()
    found["images"][0]["tier"] = examples.GEOMETRY["tier"]
    assert as_documented(found, examples.HANDOFF_ANSWER) == examples.HANDOFF_ANSWER
    pushed = service.client.post("/encode", json=examples.SGLANG_REQUESTS["part"]["value"])  # nobody listens there
    assert pushed.json()["error"] == {**examples.ERRORS["push_failed"]["error"], "limit_s": 0.5} | {
        "message": "the receiver did not take the embeddings within 0.5 s"
    }


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("openai", "float"),
        ("openai_base64", "base64"),
        ("jina", "normalized"),
        ("infinity", "float"),
        ("tokens", "tokens"),
    ],
)
def test_an_embeddings_request_gives_the_documented_answer(tiny_k3: RunningService, name: str, answer: str) -> None:
    body = examples.EMBEDDINGS_REQUESTS[name]["value"]
    check_answer(tiny_k3.client.post("/v1/embeddings", json=body), examples.EMBEDDINGS_ANSWERS[answer]["value"])


def test_the_documented_embeddings_agree_with_each_other() -> None:
    float_, base64_, unit, tokens = (
        examples.EMBEDDINGS_ANSWERS[name]["value"]["data"][0]["embedding"]
        for name in ("float", "base64", "normalized", "tokens")
    )
    assert tokens == [float_]
    assert np.array_equal(np.frombuffer(base64.b64decode(base64_), "<f4"), np.array(float_, np.float32))
    assert np.allclose(unit, np.array(float_) / np.linalg.norm(float_))


def test_the_models_example(tiny_k3: RunningService) -> None:
    assert as_documented(tiny_k3.client.get("/v1/models").json(), examples.MODELS_ANSWER) == examples.MODELS_ANSWER


def flat(width: int, height: int, mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    Image.new(mode, (width, height)).save(file, "PNG")
    return file.getvalue()


ONE = base64.b64encode(flat(1, 1)).decode()
NPY = {"accept": "application/x-npy"}
# Requests to a service with the default settings that give the documented errors.
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "invalid_request": ("/v1/encode?colour=red", {"content": flat(1, 1)}),
    "too_many_images_for_form": ("/v1/encode", {"json": {"images": [ONE, ONE]}, "headers": NPY}),
    "not_found": ("/v2/encode", {"content": b""}),
    "model_not_found": ("/v1/embeddings", {"json": {"input": ONE, "model": "another"}}),
    "method_not_allowed": ("/v1/models", {"content": b""}),
    "not_acceptable": ("/v1/encode", {"content": flat(1, 1), "headers": {"accept": "text/html"}}),
    "body_too_large": ("/v1/encode", {"content": bytes(2**26 + 1)}),
    "unsupported_image": ("/v1/encode", {"content": b"just some text"}),
    "undecodable_image": ("/v1/encode", {"content": (GOLDEN / "images" / "rgb_64x48.png").read_bytes()[:900]}),
    "image_too_large": ("/v1/encode", {"content": flat(20000, 20000, "1")}),
    "too_many_patches": ("/v1/encode", {"content": flat(2016, 2016)}),
    "too_many_images": ("/v1/encode", {"json": {"images": [ONE] * 65}}),
    "too_many_frames": ("/v1/encode", {"json": {"images": [{"type": "video_chunk", "frames": [ONE] * 5}]}}),
    "request_too_large": ("/v1/encode", {"files": [("file", ("a.png", flat(1792, 1792)))] * 5}),
    "headers_too_large": ("/v1/encode", {"headers": {"x-more": "x" * 2**15}}),
}


@pytest.mark.parametrize("code", REQUESTS)
def test_an_error_comes_as_documented(tiny_k3: RunningService, code: str) -> None:
    path, request = REQUESTS[code]
    answer = tiny_k3.client.post(path, **request)
    assert answer.status_code == BY_CODE[code].status
    example = json.dumps(examples.ERRORS[code]).replace("Kimi-K3", "tiny-k3-f32")
    assert answer.json() == json.loads(example)


def test_an_answer_without_a_key_comes_as_documented(service: RunningService) -> None:
    answer = service.client.get("/v1/models", headers={"authorization": "Bearer none"})
    assert answer.json() == examples.ERRORS["unauthorized"]


def raised_in(path: Path) -> Iterator[tuple[str, str, set[str]]]:
    """Every error that a module makes of words it spells out: its class, a pattern of them, and its numbers."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        message = node.args[0]
        parts = message.values if isinstance(message, ast.JoinedStr) else [message]
        pattern = "".join(re.escape(str(part.value)) if isinstance(part, ast.Constant) else ".+?" for part in parts)
        numbers = {
            key.value
            for keyword in node.keywords
            if keyword.arg == "numbers" and isinstance(keyword.value, ast.Dict)
            for key in keyword.value.keys
            if isinstance(key, ast.Constant)
        }
        if isinstance(message, ast.JoinedStr | ast.Constant):
            yield ast.unparse(node.func).rpartition(".")[2], pattern, {str(number) for number in numbers}


@pytest.mark.parametrize("code", sorted(BY_CODE.keys() - REQUESTS.keys()))
def test_an_error_that_no_request_forces_has_the_codes_words(code: str) -> None:
    error = examples.ERRORS[code]["error"]
    numbers = error.keys() - {"message", "type", "param", "code"}
    words = [
        pattern
        for path in (ROOT / "service").rglob("*.py")
        for name, pattern, found in raised_in(path)
        if name == BY_CODE[code].__name__ and found == numbers
    ]
    assert any(re.fullmatch(pattern, error["message"]) for pattern in words), words


def test_the_command_ends_quietly_where_nobody_reads_on() -> None:
    command = [sys.executable, "-m", "service", "openapi"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert (process.stderr.read(), process.wait(30)) == ("", 1)


def test_the_command_prints_the_services_document(here: Any, tiny_k3: RunningService, tmp_path: Path) -> None:
    assert json.loads(here("openapi").stdout) == tiny_k3.client.get("/openapi.json").json()


def test_the_command_knows_of_keys_and_hand_offs(here: Any, document: dict[str, Any], tmp_path: Path) -> None:
    printed = here(
        "openapi",
        TPVISION_SERVER__API_KEYS_FILE=str(tmp_path / "keys"),
        TPVISION_HANDOFF__VLLM_ENCODER_CACHE_DIR=str(tmp_path),
        TPVISION_HANDOFF__SGLANG_RECEIVERS="127.0.0.1",
    ).stdout
    assert json.loads(printed) == document
