"""`parallel.resident: full` through HTTP: many small images run data-parallel and come out as they do alone."""

import base64
from collections.abc import Callable

import numpy as np
import pytest
from goldens import GOLDEN
from make_photograph import acceptance_picture
from running import RunningService, assert_balanced
from safetensors.numpy import load

SIZES = [(56, 56), (112, 84), (28, 140), (84, 84), (140, 112), (28, 28), (56, 112), (112, 112)]


@pytest.fixture(scope="module")
def resident(start_service: Callable[..., RunningService]) -> RunningService:
    model = str(GOLDEN / "tiny-k3-f32")
    return start_service("--model", model, "--tp", "2", TPVISION_PARALLEL__RESIDENT="full")


def test_many_small_images_come_out_as_each_does_alone(resident: RunningService) -> None:
    pictures = [acceptance_picture(*size) for size in SIZES] * 2
    together = resident.client.post(
        "/v1/encode", json={"images": [base64.b64encode(each).decode() for each in pictures]}
    )
    assert together.status_code == 200, together.text
    tokens = load(together.content)["embeddings"]
    first = 0
    for index, picture in enumerate(pictures):
        alone = load(resident.encode(picture).content)["embeddings"]
        found = tokens[first : first + len(alone)]
        np.testing.assert_allclose(found, alone, rtol=1e-4, atol=1e-4, err_msg=f"image {index}")
        first += len(alone)
    assert first == len(tokens)
    assert_balanced(resident)
    scrape = resident.scrape()
    assert scrape.value("batches_total") == scrape.value("batch_images_count") > 0
    assert scrape.value("batches_total", mode="dp") > 0
    for mode in ("tp", "dp"):
        assert scrape.value("batch_predicted_seconds_total", mode=mode) > 0
    assert scrape.value("images_total") == scrape.value("batch_images_sum") == 2 * len(pictures)


def test_the_memory_of_all_weights_is_planned(resident: RunningService) -> None:
    capacity = resident.client.get("/v1/capacity").json()
    assert [rank["weights_bytes"] for rank in capacity["ranks"]] == [capacity["per_rank"]["weights_bytes"]] * 2
    assert {
        (timing["mode"], timing["num_images"], timing["num_patches"]) for timing in capacity["ranks"][0]["timings"]
    } == {
        ("tp", 2, 64),
        ("tp", 2, 256),
        ("dp", 2, 64),
        ("dp", 2, 256),
    }
