"""Other people's clients, as they come, against a real service."""

import base64
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import openai
import pytest
import torch
from running import GOLDEN, RunningService

MODEL = "tiny-k3-f32"
NAMES = ("rgb_64x48", "gray_70x45")


def picture(name: str) -> bytes:
    return (GOLDEN / "images" / f"{name}.png").read_bytes()


def base64_of(name: str) -> str:
    return base64.b64encode(picture(name)).decode()


DATA_URIS = [f"data:image/png;base64,{base64_of(name)}" for name in NAMES]


@pytest.fixture(scope="module")
def expected(tiny_k3: RunningService) -> Any:
    """Mean vectors, float32 [n, hidden]."""
    answer = tiny_k3.client.post("/v1/embeddings", json={"input": DATA_URIS}).json()
    return np.array([item["embedding"] for item in answer["data"]], np.float32)


def vectors_of(answer: dict[str, Any]) -> Any:
    return np.array([item["embedding"] for item in answer["data"]], np.float32)


@pytest.fixture(scope="module")
def openai_client(tiny_k3: RunningService) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tiny_k3.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("options", [{}, {"encoding_format": "float"}, {"encoding_format": "base64"}, {"user": "me"}])
def test_openai_embeds(openai_client: openai.OpenAI, expected: Any, options: dict[str, Any]) -> None:
    answer = openai_client.embeddings.create(model=MODEL, input=DATA_URIS, **options)
    found = [
        np.frombuffer(base64.b64decode(item.embedding), "<f4") if isinstance(item.embedding, str) else item.embedding
        for item in answer.data
    ]
    assert np.allclose(found, expected, atol=1e-5)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == 12


def test_openai_lists_the_model(openai_client: openai.OpenAI) -> None:
    assert [model.id for model in openai_client.models.list()] == [MODEL]


def test_openai_reads_our_errors(openai_client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        openai_client.embeddings.create(model=MODEL, input=[[1, 2, 3]])
    assert (refused.value.code, refused.value.param) == ("invalid_request", "input[0]")
    with pytest.raises(openai.NotFoundError) as unknown:
        openai_client.embeddings.create(model="another", input=DATA_URIS)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.APIStatusError) as text:
        openai_client.embeddings.create(model=MODEL, input="a photo of a cat")
    assert (text.value.status_code, text.value.code, text.value.param) == (415, "unsupported_image", "input[0]")


def test_jinas_shape(tiny_k3: RunningService, expected: Any) -> None:
    images = [{"image": base64_of(name)} for name in NAMES]
    body = {"model": MODEL, "input": images, "embedding_type": "float", "normalized": True, "task": "retrieval.query"}
    answer = tiny_k3.client.post("/v1/embeddings", json=body).json()
    assert np.allclose(vectors_of(answer), expected / np.linalg.norm(expected, axis=1, keepdims=True), atol=1e-6)
    packed = tiny_k3.client.post("/v1/embeddings", json={"input": images, "embedding_type": "base64"}).json()
    first = np.frombuffer(base64.b64decode(packed["data"][0]["embedding"]), "<f4")
    assert np.allclose(first, expected[0], atol=1e-5)


@pytest.mark.parametrize(
    ("item", "words"), [({"text": "a cat"}, "not an image"), ({"audio": "QUJD"}, "not an image"), ("Ü", "base64")]
)
def test_jinas_other_inputs_are_refused(tiny_k3: RunningService, item: Any, words: str) -> None:
    answer = tiny_k3.client.post("/v1/embeddings", json={"input": [{"image": base64_of("one_1x1")}, item]})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "input[1]")
    assert words in error["message"]


def test_infinitys_shape(tiny_k3: RunningService, expected: Any) -> None:
    body = {"model": MODEL, "input": DATA_URIS, "modality": "image", "encoding_format": "float", "user": None}
    assert np.allclose(vectors_of(tiny_k3.client.post("/v1/embeddings", json=body).json()), expected, atol=1e-5)


@pytest.mark.parametrize("modality", ["text", "audio"])
def test_infinitys_other_modalities_are_refused(tiny_k3: RunningService, modality: str) -> None:
    answer = tiny_k3.client.post("/v1/embeddings", json={"input": DATA_URIS, "modality": modality})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "modality")
    assert "'image'" in error["message"]


@dataclass
class MetadataItem:
    """The fields that vLLM's client makes of each entry of the `metadata` header; it takes no other."""

    index: int
    embed_dtype: str
    endianness: str
    start: int
    end: int
    shape: tuple[int, ...]


# dtype -> (what numpy reads it as, what torch calls it): how vLLM's client reads bytes.
VLLM_DTYPES = {
    "float32": (np.float32, torch.float32),
    "float16": (np.float16, torch.float16),
    "bfloat16": (np.float16, torch.bfloat16),
}


def read_as_vllm(header: str, body: bytes) -> list[torch.Tensor]:
    items = [MetadataItem(**item) for item in json.loads(header)["data"]]
    tensors = []
    for item in sorted(items, key=lambda item: item.index):
        stored, dtype = VLLM_DTYPES[item.embed_dtype]
        values = np.frombuffer(bytearray(body[item.start : item.end]), stored).reshape(item.shape)
        if item.endianness not in ("native", sys.byteorder):
            values = values.byteswap()
        tensors.append(torch.from_numpy(values).view(dtype))
    return tensors


@pytest.mark.parametrize("output", ["tokens", "pooled"])
@pytest.mark.parametrize("dtype", list(VLLM_DTYPES))
def test_vllms_pooling_bytes(tiny_k3_bf16: RunningService, dtype: str, output: str) -> None:
    files = [("file", (name, picture(name))) for name in NAMES]
    query = {"dtype": dtype, "output": output}
    answer = tiny_k3_bf16.client.post(
        "/v1/encode", files=files, params=query, headers={"accept": "application/octet-stream"}
    )
    as_json = tiny_k3_bf16.client.post(
        "/v1/encode", files=files, params=query, headers={"accept": "application/json"}
    ).json()
    tensors = read_as_vllm(answer.headers["metadata"], answer.content)
    assert [tensor.dtype for tensor in tensors] == [VLLM_DTYPES[dtype][1]] * 2
    for tensor, image in zip(tensors, as_json["images"], strict=True):
        assert torch.equal(tensor.float(), torch.tensor(image["embedding"]))
