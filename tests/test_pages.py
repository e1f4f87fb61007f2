"""The pages in service/docs: their tables and pictures are what the code gives, and their Python runs as it stands."""

import io
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import make_tier_pictures as tier_pictures
import numpy as np
import pytest
from make_photograph import acceptance_picture
from PIL import Image
from running import ROOT, RunningService
from tables import split_at_table

from service.geometry import plan_image
from service.image import write_patches
from tp.spec import PUBLISHED_K3

PAGES = sorted(tier_pictures.FOLDER.glob("*.md"))


@pytest.mark.parametrize("name", tier_pictures.TABLES)
def test_a_table_is_the_codes(name: str) -> None:
    assert split_at_table(tier_pictures.PAGE.read_text(), name)[1] == tier_pictures.TABLES[name]()


@pytest.mark.parametrize("tier", tier_pictures.TIERS)
def test_a_picture_is_what_the_encoder_gets(tier: int) -> None:
    with Image.open(tier_pictures.picture_path(tier)) as kept:
        assert np.array_equal(np.asarray(kept.convert("L")), np.asarray(tier_pictures.picture_of(tier).convert("L")))


def test_patches_put_together_are_the_picture_that_pillow_makes() -> None:
    plan = tier_pictures.plan_under(tier_pictures.SHEET, 4096)
    resized = tier_pictures.make_sheet().resize(plan.encoded_size, Image.Resampling.BICUBIC).convert("RGB")
    assert np.array_equal(np.asarray(tier_pictures.seen(plan)), np.asarray(resized))


def test_the_pictures_are_small() -> None:
    assert sum(path.stat().st_size for path in tier_pictures.FOLDER.iterdir()) < 200_000


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_every_link_to_a_file_leads_to_one(page: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()) if "://" not in link]
    assert links
    assert [link for link in links if not (page.parent / link).exists()] == []


EMBEDDINGS_PAGE = tier_pictures.FOLDER / "reading-embeddings.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", EMBEDDINGS_PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_python_runs_as_it_stands(
    dtype: str, tiny_k3: RunningService, tiny_k3_bf16: RunningService, tmp_path: Path
) -> None:
    service = tiny_k3 if dtype == "float32" else tiny_k3_bf16
    (tmp_path / "photo.jpg").write_bytes(acceptance_picture(500, 300))
    code = "".join(BLOCKS).replace("http://127.0.0.1:8000", service.url)
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "NO_PROXY": "127.0.0.1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [
        "(198, 128) [1, 22, 36]",
        "98 (224.0, 140.0, 252.0, 168.0)",
        "(11, 18) 1.0",
        "(1, 128) True",
        "(198, 128) [2, 22, 36] 1584",
    ]


def functions_of_the_page(names: Sequence[str]) -> dict[str, Any]:
    scope: dict[str, Any] = {}
    for name in names:
        (source,) = re.findall(rf"^def {name}\(.*?(?=^\S)", "".join(BLOCKS), re.MULTILINE | re.DOTALL)
        exec(source, scope)
    return scope


@pytest.mark.parametrize("size", [(500, 300), (56, 28), (29, 1), (3001, 1999)])
def test_a_token_is_fed_by_the_pixels_that_the_page_says(size: tuple[int, int]) -> None:
    """Each token's four patches are the padded picture in its box, and the box's pixels lead back to the token."""
    page = functions_of_the_page(["pixels_of", "token_at"])
    plan = plan_image(*size, PUBLISHED_K3.processor, [4096], "downscale")
    image = {"grid_thw": plan.grid, "original_size": plan.original_size, "encoded_size": plan.encoded_size}
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (*size[::-1], 3), np.uint8))
    file = io.BytesIO()
    picture.save(file, "PNG")
    rows = np.empty((plan.patches, 588), np.uint8)
    write_patches(file.getvalue(), plan, PUBLISHED_K3.processor, orientation="apply", gray16="scale", out=rows)
    padded = np.zeros((*plan.padded_size[::-1], 3), np.uint8)
    encoded = picture.resize(plan.encoded_size, Image.Resampling.BICUBIC)
    padded[: encoded.height, : encoded.width] = np.asarray(encoded)
    for token in range(plan.grid.num_tokens):
        left, top, right, bottom = page["pixels_of"](token, image)
        assert 0 <= left < right <= size[0] and 0 <= top < bottom <= size[1]
        assert page["token_at"]((left + right) / 2, (top + bottom) / 2, image) == token
        column, row = (round(p * e / o) for p, o, e in zip((left, top), size, plan.encoded_size, strict=True))
        box = padded[row : row + 28, column : column + 28]
        # [28, 28, 3] -> [patch row, row, patch column, column, channel] -> [4, 588]
        patches = box.reshape(2, 14, 2, 14, 3).transpose(0, 2, 4, 1, 3).reshape(4, 588)
        assert np.array_equal(rows[4 * token : 4 * token + 4], patches)
