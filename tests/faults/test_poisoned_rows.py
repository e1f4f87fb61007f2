"""With NaN in every row that nobody wrote, a token that is not written, or a stale row that is read, shows at once."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from running import GOLDEN, REFERENCE_IMAGES, RunningService, assert_balanced
from safetensors.torch import load, load_file

pytestmark = pytest.mark.faults

MANIFEST = json.loads((GOLDEN / "manifest.json").read_text())
MODEL = MANIFEST["models"]["tiny-k3"]


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_token_of_every_image_is_written(start_service: Callable[..., RunningService], world_size: int) -> None:
    environ = {"PYTHONPATH": str(Path(__file__).parent), "TP_POISON": "1", **REFERENCE_IMAGES}
    service = start_service("--model", str(GOLDEN / "tiny-k3-f32"), "--tp", str(world_size), **environ)
    expected = load_file(GOLDEN / MODEL["expected"])
    pictures = {name: (GOLDEN / MANIFEST["images"][name]["file"]).read_bytes() for name in MODEL["emb_images"]}
    for _ in range(2):  # the second time on rows that were used before
        for name, picture in pictures.items():
            tokens = load(service.encode(picture).content)["embeddings"]
            torch.testing.assert_close(tokens, expected[f"{name}/emb_f32"], rtol=0, atol=1e-4)
    files = [("file", (name, pictures[name])) for name in MODEL["batch_images"]]
    tokens = load(service.client.post("/v1/encode", files=files).content)["embeddings"]
    torch.testing.assert_close(tokens, expected["batch/emb_f32"], rtol=0, atol=1e-4)
    assert_balanced(service)
