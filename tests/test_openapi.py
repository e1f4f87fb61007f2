"""The OpenAPI document is true: schemathesis finds no 5xx and no answer that it does not describe."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from running import GOLDEN, RunningService

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
    started: RunningService = start_service(
        *("--model", str(GOLDEN / "tiny-k3-f32"), "--tp", "2", "--policy", "downscale", "--capacities", "64,256"),
        TPVISION_SERVER__API_KEYS_FILE=str(keys),
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


@pytest.mark.parametrize("path", ["encode", "embeddings"])
def test_the_documents_own_example_works(service: RunningService, document: dict[str, Any], path: str) -> None:
    body = document["paths"][f"/v1/{path}"]["post"]["requestBody"]["content"]["application/json"]["example"]
    assert service.client.post(f"/v1/{path}", json=body).status_code == 200


def test_every_operation_documents_what_comes_before_it(document: dict[str, Any]) -> None:
    for methods in document["paths"].values():
        for operation in methods.values():
            assert {"400", "408", "431"} <= set(operation["responses"])


def test_keys_are_in_the_document_where_they_are_configured(tiny_k3: RunningService, document: dict[str, Any]) -> None:
    for path, methods in document["paths"].items():
        assert [operation.get("security") for operation in methods.values()] == [
            [{"key": []}] if path.startswith("/v1/") else None
        ]
    assert "securitySchemes" not in tiny_k3.client.get("/openapi.json").json()["components"]
