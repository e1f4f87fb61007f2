"""JSON answers, read back."""

import base64
import json
from typing import Any

import numpy as np
import pytest
from running import GOLDEN

from service import schemas
from service.geometry import plan_image
from service.tokens import STORAGE, Embeddings, TokenOptions, read_tokens
from tp.spec import Dtype, read_spec

SPEC = read_spec(GOLDEN / "tiny-k3-f32")
PLANS = [plan_image(28 * num_tokens, 28, SPEC.processor, (4096,), "refuse") for num_tokens in (1, 40, 7)]
CONTEXT = schemas.AnswerContext("an id", "a model", SPEC)


def embeddings_of(dtype: Dtype, *, pooled: bool) -> Embeddings:
    rng = np.random.default_rng(0)
    images = [rng.standard_normal((plan.grid.num_tokens, SPEC.text_hidden_size), np.float32) for plan in PLANS]
    return read_tokens([image.view(np.uint8) for image in images], "float32", TokenOptions(dtype, pooled), "images")


def read_value(entry: dict[str, Any], dtype: Dtype, encoding: str) -> Any:
    if encoding == "float":
        return np.array(entry["embedding"], np.float32)
    values = np.frombuffer(base64.b64decode(entry["embedding"], validate=True), STORAGE[dtype])
    return values.reshape(entry.get("shape", -1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("encoding", ["float", "base64"])
@pytest.mark.parametrize("pooled", [False, True], ids=["tokens", "pooled"])
@pytest.mark.parametrize("route", ["encode", "embeddings"])
def test_json_in_pieces_is_the_embeddings(
    dtype: Dtype, encoding: schemas.EncodingFormat, pooled: bool, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schemas, "_PIECE_BYTES", 4000)  # a few rows
    embeddings = embeddings_of(dtype, pooled=pooled)
    if route == "encode":
        answer = schemas.encode_embeddings("application/json", embeddings, PLANS, CONTEXT, encoding)
    else:
        answer = schemas.openai_embeddings(embeddings, PLANS, CONTEXT, encoding)
    assert max(map(len, answer.parts)) <= 3 * 4000  # of which one part holds the interpreter for as long as it is made
    assert len(answer.parts) <= 1 + answer.num_bytes // 4000
    document = json.loads(b"".join(answer.parts))
    entries = document["images" if route == "encode" else "data"]
    for index, entry in enumerate(entries):
        expected = embeddings.of_image(index) if encoding == "base64" else embeddings.as_float32(index)
        np.testing.assert_array_equal(
            read_value(entry, dtype, encoding), expected.reshape(embeddings.shape_of(index)), strict=True
        )
    geometry = schemas.geometry(PLANS, embeddings.bounds, SPEC)
    assert [{key: image[key] for key in geometry[0]} for image in document["images"]] == geometry
