"""The largest admitted picture, and the first one that is too large, on the demo model with two ranks."""

from typing import Any

import pytest
from make_photograph import acceptance_picture
from running import RunningService, images_of
from safetensors.torch import load

from service.demo_model import write_demo_model


@pytest.fixture(scope="module")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "demo"
    write_demo_model(folder, size="tiny")
    return str(folder)


def test_the_largest_admitted_picture_is_encoded_whole(start_service: Any, demo_model: str) -> None:
    service: RunningService = start_service("--model", demo_model, "--tp", "2")
    answer = service.encode(acceptance_picture())
    assert answer.status_code == 200
    assert load(answer.content)["embeddings"].shape == (4096, 128)
    (image,) = images_of(answer)
    assert (image["patches"], image["tier"], image["downscaled"]) == (16384, 16384, False)

    refused = service.encode(acceptance_picture(1820, 1792))
    assert refused.status_code == 422
    error = refused.json()["error"]
    assert error["code"] == "too_many_patches"
    assert (error["patches"], error["limit"]) == (16640, 16384)
    assert str(error["patches"]) in error["message"] and str(error["limit"]) in error["message"]
    assert error["downscaled_size"] == [1792, 1765]


def test_a_larger_picture_is_downscaled_where_that_is_the_policy(start_service: Any, demo_model: str) -> None:
    service: RunningService = start_service("--model", demo_model, "--tp", "2", "--policy", "downscale")
    answer = service.encode(acceptance_picture(1820, 1792))
    (image,) = images_of(answer)
    assert image["downscaled"]
    assert image["original_size"] == [1820, 1792]
    assert image["patches"] <= 16384
    assert load(answer.content)["embeddings"].shape == (image["num_tokens"], 128)
    stricter = service.encode(acceptance_picture(1820, 1792), oversize="refuse")
    assert stricter.json()["error"]["code"] == "too_many_patches"
