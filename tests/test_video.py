"""Video chunks over HTTP on K3's tower: the golden tokens, chunks among images, and every refusal."""

from typing import Any

import numpy as np
import pytest
import torch
from goldens import expected_of
from running import RunningService, images_of
from test_families import assert_passes, chunk, golden_chunks, picture, send, text_of, tokens_of


def frames(num_frames: int, width: int, height: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (num_frames, height, width, 3), np.uint8)


def refused(service: RunningService, *items: Any, **query: str) -> dict[str, Any]:
    answer = send(service, *items, **query)
    assert 400 <= answer.status_code < 500, answer.text
    return {"status": answer.status_code, **answer.json()["error"]}


def test_k3_chunks_are_the_golden_ones(tiny_k3: RunningService) -> None:
    grids, chunks = golden_chunks("tiny-k3")
    answer = send(tiny_k3, *chunks)
    assert_passes(tokens_of(answer), expected_of("tiny-k3")["temporal/emb_f32"], "f32", "tiny-k3 temporal")
    assert [image["grid_thw"] for image in images_of(answer)] == [list(grid) for grid in grids]


def test_chunks_and_images_mix(tiny_k3: RunningService) -> None:
    several = chunk(frames(3, 60, 30))
    data = {"type": "image", "data": text_of(picture("rgb_64x48"))}
    mixed = send(tiny_k3, data, several, data)
    first, middle, last = images_of(mixed)
    tokens = tokens_of(mixed)
    alone = tokens_of(tiny_k3.encode(picture("rgb_64x48")))
    assert_passes(tokens[first["start"] : first["end"]], alone, "f32", "before")
    assert_passes(tokens[last["start"] : last["end"]], alone, "f32", "after")
    chunk_alone = tokens_of(send(tiny_k3, several))
    assert_passes(tokens[middle["start"] : middle["end"]], chunk_alone, "f32", "chunk")
    assert middle["grid_thw"] == [3, 4, 6]
    assert middle["original_size"] == [60, 30]
    assert middle["prompt"] == "<|media_begin|>video<|media_content|><|media_pad|><|media_end|>"
    assert first["prompt"] == "<|media_begin|>image 64x48<|media_content|><|media_pad|><|media_end|>"


def test_one_frame_is_encoded_as_an_image_is(tiny_k3: RunningService) -> None:
    one = chunk(frames(1, 60, 30))
    assert torch.equal(tokens_of(send(tiny_k3, one)), tokens_of(send(tiny_k3, one["frames"][0])))


def test_order_matters(tiny_k3: RunningService) -> None:
    several = chunk(frames(2, 28, 28))
    back = {**several, "frames": several["frames"][::-1]}
    assert not torch.allclose(tokens_of(send(tiny_k3, several)), tokens_of(send(tiny_k3, back)), atol=1e-3)


def test_too_many_frames(tiny_k3: RunningService) -> None:
    error = refused(tiny_k3, text_of(picture("one_1x1")), chunk(frames(5, 28, 28)))
    assert (error["status"], error["code"], error["param"]) == (422, "too_many_frames", "images[1]")
    assert (error["num_frames"], error["limit"]) == (5, 4)
    assert "5" in error["message"] and "4" in error["message"]


def test_frames_need_one_size(tiny_k3: RunningService) -> None:
    several = chunk(frames(2, 30, 28))
    several["frames"] += chunk(frames(1, 28, 30))["frames"]
    error = refused(tiny_k3, several)
    assert (error["status"], error["code"], error["param"]) == (400, "invalid_request", "images[0].frames[2]")
    assert "28 x 30" in error["message"] and "30 x 28" in error["message"]
    assert (error["size"], error["first_size"]) == ([28, 30], [30, 28])


def test_the_bad_frame_is_named(tiny_k3: RunningService) -> None:
    several = chunk(frames(2, 60, 60))
    broken = several["frames"][1][: len(several["frames"][1]) // 8 * 4]
    for bad, status, code in ((broken, 422, "undecodable_image"), (text_of(b"text"), 415, "unsupported_image")):
        error = refused(tiny_k3, {**several, "frames": [several["frames"][0], bad]})
        assert (error["status"], error["code"], error["param"]) == (status, code, "images[0].frames[1]")
    error = refused(tiny_k3, {**several, "frames": [several["frames"][0], "no base64!"]})
    assert (error["status"], error["param"]) == (400, "images[0].frames[1]")


def test_frames_count_as_images(tiny_k3: RunningService) -> None:
    several = chunk(frames(4, 28, 28))
    assert send(tiny_k3, *[several] * 16).status_code == 200
    error = refused(tiny_k3, *[several] * 16, several["frames"][0])
    assert (error["code"], error["num_images"], error["limit"]) == ("too_many_images", 65, 64)


def test_the_embeddings_route_takes_images(tiny_k3: RunningService) -> None:
    answer = tiny_k3.client.post("/v1/embeddings", json={"input": [chunk(frames(1, 28, 28))]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input[0]")
    assert "POST /v1/encode" in answer.json()["error"]["message"]


def test_frames_count_together_against_the_tier(tiny_k3: RunningService) -> None:
    """Each frame has 4,900 patches; four of them are over the top tier of 16,384."""
    gray = chunk(np.full((1, 980, 980, 3), 9, np.uint8))["frames"]
    error = refused(tiny_k3, {"type": "video_chunk", "frames": gray * 4})
    assert (error["status"], error["code"], error["param"]) == (422, "too_many_patches", "images[0]")
    assert (error["patches"], error["limit"]) == (19_600, 16_384)
    assert error["downscaled_size"] == [896, 896]


@pytest.mark.parametrize("form", ["application/octet-stream", "application/json"])
def test_every_form_carries_chunks(tiny_k3: RunningService, form: str) -> None:
    answer = tiny_k3.client.post(
        "/v1/encode", json={"images": [chunk(frames(2, 28, 28))]}, headers={"accept": form}, params={"output": "pooled"}
    )
    assert answer.status_code == 200
    assert '"grid_thw":[2,2,2]' in (answer.text if form.endswith("json") else answer.headers["x-tpvision-images"])
