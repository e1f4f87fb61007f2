"""Kimi K2.5 and Kimi-VL beside K3, over HTTP: the golden tokens at every world size, video chunks, and 16 heads."""

import base64
import io
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from conftest import Here
from goldens import DTYPES, GOLDEN, MANIFEST, Distance, encode, expected_of, run, to_rows
from PIL import Image
from running import REFERENCE_IMAGES, RunningService, images_of
from safetensors.torch import load, save_file

from tp.checkpoint import expected_tensors
from tp.parallel import TPGroup
from tp.runner import Runner
from tp.spec import Grid, read_spec

WORLD_SIZES = (1, 2, 4)
ENVIRON = {**REFERENCE_IMAGES, "TPVISION_IMAGE__DECODE_PROCESSES": "1"}
IDS = ("rgb_64x48", "la_61x33", "pal_trns_57x83", "cmyk_80x60", "gray16_40x56", "one_1x1", "exif6_90x50", "pal_620x480")
FAMILIES = [(model, precision) for model in ("tiny-k25", "tiny-kimivl") for precision in DTYPES]
Services = dict[int, RunningService]


@pytest.fixture(scope="module", params=FAMILIES, ids="-".join)
def family(request: pytest.FixtureRequest) -> Iterator[tuple[str, str, Services]]:
    """Model, precision, and a service of it for each world size; they start side by side."""
    model, precision = request.param
    folder = str(GOLDEN / f"{model}-{precision}")
    services = {size: RunningService(["--model", folder, "--tp", str(size)], ENVIRON) for size in WORLD_SIZES}
    try:
        for service in services.values():
            service.wait_ready()
        yield model, precision, services
    finally:
        with ThreadPoolExecutor(len(services)) as pool:
            list(pool.map(RunningService.stop, services.values()))


def picture(name: str) -> bytes:
    return (GOLDEN / MANIFEST["images"][name]["file"]).read_bytes()


def send(service: RunningService, *items: Any, **query: str) -> httpx.Response:
    return service.client.post(
        "/v1/encode", json={"images": items}, params=query, headers={"accept": "application/vnd.safetensors"}
    )


def tokens_of(answer: httpx.Response) -> torch.Tensor:
    assert answer.status_code == 200, answer.text
    return load(answer.content)["embeddings"]


def text_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def chunk(frames: Any) -> dict[str, Any]:
    """A video chunk of uint8 frames [t, height, width, 3], as PNG files: nothing is lost."""
    files = []
    for frame in frames:
        buffer = io.BytesIO()
        Image.fromarray(frame).save(buffer, "PNG")
        files.append(text_of(buffer.getvalue()))
    return {"type": "video_chunk", "frames": files}


def golden_chunks(model: str) -> tuple[list[Grid], list[dict[str, Any]]]:
    stored = expected_of(model)
    grids = [Grid(*grid) for grid in stored["temporal/grid_thw"].tolist()]
    parts = stored["temporal/frames_u8"].split([grid.num_patches * 588 for grid in grids])
    shaped = (
        part.numpy().reshape(grid.t, 14 * grid.h, 14 * grid.w, 3) for part, grid in zip(parts, grids, strict=True)
    )
    return grids, [chunk(frames) for frames in shaped]


def assert_passes(found: torch.Tensor, expected: torch.Tensor, precision: str, what: object) -> None:
    distance = Distance.of(found, expected)
    assert distance.passes_f32 if precision == "f32" else distance.passes_bf16, (what, distance)


def test_tokens_are_the_golden_ones_at_every_world_size(family: tuple[str, str, Services]) -> None:
    model, precision, services = family
    expected = expected_of(model)
    for size, service in services.items():
        answer = send(service, *(text_of(picture(name)) for name in IDS))
        tokens, images = tokens_of(answer), images_of(answer)
        assert tokens.dtype == getattr(torch, DTYPES[precision])
        for name, image in zip(IDS, images, strict=True):
            key = f"{name}/emb_{'f32' if precision == 'f32' else 'bf16w_f32'}"
            assert_passes(tokens[image["start"] : image["end"]], expected[key], precision, (model, size, name))
            assert image["original_size"] == MANIFEST["images"][name]["size_wh"]


def test_video_chunks_are_the_golden_ones_where_the_tower_takes_them(family: tuple[str, str, Services]) -> None:
    model, precision, services = family
    if model == "tiny-kimivl":
        check_refusal_of_video(services[1])
        return
    grids, chunks = golden_chunks(model)
    expected = expected_of(model)["temporal/emb_f32"]
    if precision == "bf16":  # the goldens hold no float32 of the bf16 weights for frames
        expected = run(model, "bf16", TPGroup.single(), dtype="float32")["temporal/emb"]
    for size, service in services.items():
        answer = send(service, *chunks)
        assert_passes(tokens_of(answer), expected, precision, (model, size, "temporal"))
        for grid, image in zip(grids, images_of(answer), strict=True):
            assert image["grid_thw"] == list(grid)
            assert (image["num_tokens"], image["patches"]) == (grid.h // 2 * (grid.w // 2), grid.t * grid.h * grid.w)
            assert image["original_size"] == [14 * grid.w, 14 * grid.h]


def check_refusal_of_video(service: RunningService) -> None:
    answer = send(service, chunk(torch.zeros(2, 28, 28, 3, dtype=torch.uint8).numpy()))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_request", "images[0]")
    assert "images only" in error["message"]
    assert service.client.get("/v1/capacity").json()["video_chunk"] is None


def test_the_prompt_is_the_families_own(family: tuple[str, str, Services]) -> None:
    model, _, services = family
    marker = {"tiny-k25": "begin", "tiny-kimivl": "start"}[model]
    (image,) = images_of(services[1].encode(picture("rgb_64x48")))
    assert image["prompt"] == f"<|media_{marker}|>image<|media_content|><|media_pad|><|media_end|>"


@pytest.fixture(scope="module")
def sixteen_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A seeded checkpoint like K2.5's with its 16 heads, of a later model's name."""
    folder = tmp_path_factory.mktemp("models") / "sixteen"
    folder.mkdir()
    config = json.loads((GOLDEN / "tiny-k25-f32" / "config.json").read_text())
    config["model_type"] = "kimi_k28"
    config["vision_config"] |= {"vt_hidden_size": 128, "mm_hidden_size": 128, "vt_num_attention_heads": 16}
    (folder / "config.json").write_text(json.dumps(config))
    preprocessor = GOLDEN / "tiny-k25-f32" / "preprocessor_config.json"
    (folder / preprocessor.name).write_bytes(preprocessor.read_bytes())
    generator = torch.Generator().manual_seed(16)
    tensors = {
        name: torch.randn(shape, generator=generator) / (shape[-1] ** 0.5 if len(shape) > 1 else 1)
        for name, shape in expected_tensors(read_spec(folder)).items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_three_ranks_do_not_divide_sixteen_heads(sixteen_heads: Path, here: Here) -> None:
    ended = here("serve", "--model", str(sixteen_heads), "--tp", "3", "--port", "0", "--device", "cpu")
    assert ended.returncode == 2
    assert "16 attention heads; legal sizes are 1, 2, 4, 8, 16" in ended.stderr
    assert "3 group(s) of 1" in ended.stderr


def test_four_ranks_do_and_an_unknown_name_is_logged(sixteen_heads: Path, start_service: Any) -> None:
    service: RunningService = start_service("--model", str(sixteen_heads), "--tp", "4", **REFERENCE_IMAGES)
    assert any("'kimi_k28' is not known" in line and "Kimi K2.5" in line for line in service.log)
    spec = read_spec(sixteen_heads)
    runner = Runner.load(sixteen_heads, spec, dtype="float32", group=TPGroup.single())
    pixels = torch.randint(0, 256, (1, 84, 112, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    (expected,) = encode(runner, [Grid(1, 6, 8)], [to_rows(pixels.numpy())])
    answer = send(service, chunk(pixels.numpy())["frames"][0])
    assert_passes(tokens_of(answer), expected, "f32", "sixteen heads")
    assert images_of(answer)[0]["prompt"] is None
