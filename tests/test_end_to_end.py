"""The main job over HTTP: images in, the golden merged tokens out of two tensor-parallel ranks, in every form."""

import base64
import io
import json
from collections.abc import Callable, Iterable
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from running import GOLDEN, OWN_STAGES, RunningService, images_of, metadata_of
from safetensors import safe_open
from safetensors.torch import load, load_file

MANIFEST = json.loads((GOLDEN / "manifest.json").read_text())
MODEL = MANIFEST["models"]["tiny-k3"]
EXPECTED = load_file(GOLDEN / MODEL["expected"])
HIDDEN = 128
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def picture(name: str) -> bytes:
    return (GOLDEN / MANIFEST["images"][name]["file"]).read_bytes()


def tokens_of(answer: httpx.Response) -> torch.Tensor:
    assert answer.status_code == 200, answer.text
    return load(answer.content)["embeddings"]


def assert_close_f32(tokens: torch.Tensor, expected: torch.Tensor) -> None:
    assert (tokens - expected).norm() / expected.norm() <= 1e-5
    assert (tokens - expected).abs().max() <= 1e-4


def assert_close_bf16(tokens: torch.Tensor, expected: torch.Tensor) -> None:
    tokens = tokens.float()
    assert (tokens - expected).norm() / expected.norm() <= 3e-2
    assert torch.cosine_similarity(tokens, expected, dim=-1).min() >= 0.999


@pytest.mark.parametrize("name", MODEL["emb_images"])
def test_float32_tokens_are_the_golden_ones(tiny_k3: RunningService, name: str) -> None:
    assert_close_f32(tokens_of(tiny_k3.encode(picture(name))), EXPECTED[f"{name}/emb_f32"])


@pytest.mark.parametrize("name", [name for name in MODEL["emb_images"] if f"{name}/emb_bf16w_f32" in EXPECTED])
def test_bfloat16_tokens_are_the_golden_ones(tiny_k3_bf16: RunningService, name: str) -> None:
    assert_close_bf16(tokens_of(tiny_k3_bf16.encode(picture(name))), EXPECTED[f"{name}/emb_bf16w_f32"])


def as_multipart(service: RunningService, names: Iterable[str]) -> httpx.Response:
    return service.client.post("/v1/encode", files=[("file", (name, picture(name))) for name in names])


def as_json(service: RunningService, names: Iterable[str]) -> httpx.Response:
    texts = [base64.b64encode(picture(name)).decode() for name in names]
    items: list[Any] = [f"data:image/png;base64,{text}" for text in texts]
    items[0] = texts[0]
    items[1] = {"type": "image", "data": texts[1]}
    items[2] = {"type": "image_url", "url": items[2]}
    headers = {"accept": "application/vnd.safetensors"}
    return service.client.post("/v1/encode", json={"images": items}, headers=headers)


@pytest.mark.parametrize("send", [as_multipart, as_json])
def test_images_of_one_request_come_back_in_order(
    tiny_k3: RunningService, send: Callable[[RunningService, Iterable[str]], httpx.Response]
) -> None:
    answer = send(tiny_k3, MODEL["batch_images"])
    assert_close_f32(tokens_of(answer), EXPECTED["batch/emb_f32"])
    assert load(answer.content)["grid_thw"].tolist() == EXPECTED["batch/grid"].tolist()
    images = images_of(answer)
    for name, image in zip(MODEL["batch_images"], images, strict=True):
        assert_close_f32(tokens_of(answer)[image["start"] : image["end"]], EXPECTED[f"{name}/emb_f32"])
        assert image["original_size"] == MANIFEST["images"][name]["size_wh"]
        assert image["patches"] == MANIFEST["images"][name]["preprocess"]["k3.published"]["n_patches"]


def from_safetensors(answer: httpx.Response, dtype: str) -> torch.Tensor:
    return load(answer.content)["embeddings"]


def from_octets(answer: httpx.Response, dtype: str) -> torch.Tensor:
    data = json.loads(answer.headers["metadata"])["data"][0]
    assert (data["start"], data["end"], data["embed_dtype"]) == (0, len(answer.content), dtype)
    return torch.frombuffer(bytearray(answer.content), dtype=DTYPES[dtype]).reshape(data["shape"])


def from_npy(answer: httpx.Response, dtype: str) -> torch.Tensor:
    return torch.from_numpy(np.load(io.BytesIO(answer.content)))


def from_json_base64(answer: httpx.Response, dtype: str) -> torch.Tensor:
    image = answer.json()["images"][0]
    return torch.frombuffer(bytearray(base64.b64decode(image["embedding"])), dtype=DTYPES[dtype]).reshape(
        image["shape"]
    )


def from_json_floats(answer: httpx.Response, dtype: str) -> torch.Tensor:
    return torch.tensor(answer.json()["images"][0]["embedding"], dtype=torch.float64).to(DTYPES[dtype])


FORMS = [
    ("application/vnd.safetensors", "float", from_safetensors),
    ("application/octet-stream", "float", from_octets),
    ("application/x-npy", "float", from_npy),
    ("application/json", "base64", from_json_base64),
    ("application/json", "float", from_json_floats),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("accept", "encoding", "read"), FORMS)
def test_every_form_holds_the_same_bits(
    tiny_k3: RunningService, accept: str, encoding: str, read: Callable[[httpx.Response, str], torch.Tensor], dtype: str
) -> None:
    reference = tokens_of(tiny_k3.encode(picture("rgb_64x48")))
    answer = tiny_k3.client.post(
        "/v1/encode",
        content=picture("rgb_64x48"),
        params={"dtype": dtype, "encoding_format": encoding},
        headers={"accept": accept},
    )
    if (accept, dtype) == ("application/x-npy", "bfloat16"):
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "dtype")
        return
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == accept
    assert torch.equal(read(answer, dtype), reference.to(DTYPES[dtype]))


@pytest.mark.parametrize("accept", ["application/octet-stream", "application/x-npy"])
def test_geometry_is_the_same_list_in_every_form(tiny_k3: RunningService, accept: str) -> None:
    in_safetensors = images_of(tiny_k3.encode(picture("rgb_64x48")))
    answer = tiny_k3.client.post("/v1/encode", content=picture("rgb_64x48"), headers={"accept": accept})
    assert json.loads(answer.headers["x-tpvision-images"]) == in_safetensors
    in_json = tiny_k3.client.post(
        "/v1/encode", content=picture("rgb_64x48"), headers={"accept": "application/json"}
    ).json()["images"]
    assert [{key: image[key] for key in in_safetensors[0]} for image in in_json] == in_safetensors
    assert in_safetensors == [
        {
            "grid_thw": [1, 4, 6],
            "num_tokens": 6,
            "start": 0,
            "end": 6,
            "original_size": [64, 48],
            "encoded_size": [64, 48],
            "padded_size": [84, 56],
            "downscaled": False,
            "patches": 24,
            "tier": 1024,
            "prompt": "<|media_begin|>image 64x48<|media_content|><|media_pad|><|media_end|>",
        }
    ]


def test_answers_come_in_the_compute_dtype_but_json_in_float32(tiny_k3_bf16: RunningService) -> None:
    tokens = tokens_of(tiny_k3_bf16.encode(picture("rgb_64x48")))
    assert tokens.dtype == torch.bfloat16
    answer = tiny_k3_bf16.client.post(
        "/v1/encode", content=picture("rgb_64x48"), headers={"accept": "application/json"}
    ).json()
    assert answer["dtype"] == "float32"
    assert torch.equal(torch.tensor(answer["images"][0]["embedding"]), tokens.float())


@pytest.mark.parametrize("normalize", [False, True])
def test_pooled_is_one_float32_mean_an_image(tiny_k3_bf16: RunningService, normalize: bool) -> None:
    names = ["rgb_64x48", "one_1x1"]
    files = [("file", (name, picture(name))) for name in names]
    query = {"output": "pooled", "normalize": str(normalize).lower()}
    pooled = tokens_of(tiny_k3_bf16.client.post("/v1/encode", files=files, params=query))
    expected = torch.stack([tokens_of(tiny_k3_bf16.encode(picture(name))).float().mean(0) for name in names])
    if normalize:
        expected = torch.nn.functional.normalize(expected)
    assert pooled.dtype == torch.float32
    assert torch.allclose(pooled, expected, rtol=1e-5, atol=1e-6)


def data_uri(name: str) -> str:
    return "data:image/png;base64," + base64.b64encode(picture(name)).decode()


def embed(service: RunningService, **body: Any) -> httpx.Response:
    return service.client.post("/v1/embeddings", json=body)


def test_openai_embeddings_floats_and_base64_agree(tiny_k3: RunningService) -> None:
    names = ["rgb_64x48", "gray_70x45"]
    floats = embed(tiny_k3, input=[data_uri(name) for name in names], model="tiny-k3-f32", user="somebody").json()
    packed = embed(tiny_k3, input=[data_uri(name) for name in names], encoding_format="base64").json()
    assert [item["index"] for item in floats["data"]] == [0, 1]
    assert floats["usage"] == {"prompt_tokens": 6 + 6, "total_tokens": 12}
    assert [image["downscaled"] for image in floats["images"]] == [False, False]
    assert [image["original_size"] for image in floats["images"]] == [[64, 48], [70, 45]]
    for index, name in enumerate(names):
        vector = np.frombuffer(base64.b64decode(packed["data"][index]["embedding"]), "<f4")
        assert np.array_equal(vector, np.float32(floats["data"][index]["embedding"]))
        expected = EXPECTED[f"{name}/emb_f32"].mean(0)
        assert torch.allclose(torch.from_numpy(vector.copy()), expected, atol=1e-4)


def test_openai_embeddings_without_pooling_are_the_token_matrix(tiny_k3: RunningService) -> None:
    expected = tokens_of(tiny_k3.encode(picture("rgb_64x48")))
    (nested,) = embed(tiny_k3, input=data_uri("rgb_64x48"), pooling="none").json()["data"]
    assert torch.equal(torch.tensor(nested["embedding"]), expected)
    (packed,) = embed(tiny_k3, input=data_uri("rgb_64x48"), pooling="none", encoding_format="base64").json()["data"]
    values = np.frombuffer(base64.b64decode(packed["embedding"]), "<f4").reshape(packed["shape"])
    assert torch.equal(torch.from_numpy(values.copy()), expected)


def test_vllm_readers_find_each_image_by_its_byte_range(tiny_k3: RunningService) -> None:
    names = ["rgb_64x48", "one_1x1", "gray_70x45"]
    files = [("file", (name, picture(name))) for name in names]
    answer = tiny_k3.client.post("/v1/encode", files=files, headers={"accept": "application/octet-stream"})
    described = json.loads(answer.headers["metadata"])
    assert set(described) == {"id", "created", "model", "data", "usage"}
    for name, item in zip(names, described["data"], strict=True):
        part = torch.frombuffer(bytearray(answer.content[item["start"] : item["end"]]), dtype=torch.float32)
        assert_close_f32(part.reshape(item["shape"]), EXPECTED[f"{name}/emb_f32"])


def test_an_answer_says_who_it_is_and_where_the_time_went(tiny_k3: RunningService) -> None:
    answer = tiny_k3.client.post(
        "/v1/encode", content=picture("one_1x1"), headers={"x-request-id": "trace-7", "accept": "*/*"}
    )
    assert answer.headers["x-request-id"] == "trace-7"
    assert metadata_of(answer)["request_id"] == "trace-7"
    assert metadata_of(answer)["model"] == "tiny-k3-f32"
    stages = [part.split(";")[0].strip() for part in answer.headers["server-timing"].split(",")]
    assert stages == OWN_STAGES


def test_safetensors_answers_open_with_the_library(tiny_k3: RunningService, tmp_path: Any) -> None:
    path = tmp_path / "answer.safetensors"
    path.write_bytes(tiny_k3.encode(picture("rgb_64x48")).content)
    with safe_open(path, framework="pt") as opened:
        assert sorted(opened.keys()) == ["embeddings", "grid_thw"]
        assert opened.get_tensor("grid_thw").dtype == torch.int64


def test_models_and_capacity_describe_what_runs(tiny_k3: RunningService) -> None:
    (model,) = tiny_k3.client.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["dimensions"]) == ("tiny-k3-f32", "model", HIDDEN)
    capacity = tiny_k3.client.get("/v1/capacity").json()
    assert [tier["patches"] for tier in capacity["tiers"]] == [1024, 4096, 16384]
    assert capacity["policy"] == "refuse"
    assert capacity["legal_world_sizes"] == [1, 2, 3, 4, 6, 12]
    assert capacity["world_size"] == 2


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/health"])
def test_probes_answer_200_while_ready(tiny_k3: RunningService, path: str) -> None:
    assert tiny_k3.client.get(path).status_code == 200
