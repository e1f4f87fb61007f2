"""The golden encoder cases: what goes in, what must come out, and how close. See tests/data/golden/README.md."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from tp.model import RMS_NORM_EPS
from tp.parallel import TPGroup
from tp.runner import Runner
from tp.spec import Dtype, EncoderSpec, Grid, read_spec

GOLDEN = Path(__file__).parent / "data" / "golden"
MANIFEST: dict[str, Any] = json.loads((GOLDEN / "manifest.json").read_text())
MODELS = ("tiny-k3", "tiny-k25", "tiny-kimivl")
DTYPES: dict[str, Dtype] = {"f32": "float32", "bf16": "bfloat16"}
EPS = {"": RMS_NORM_EPS, "_eps2m7": 2.0**-7, "_eps1em5": 1e-5}
Rows = NDArray[np.uint8]

torch.set_num_threads(1)  # tiny tensors: a second thread only waits, the longer the busier the machine


@dataclass(frozen=True)
class Case:
    """One forward: a batch and the tower's RMSNorm epsilon."""

    name: str
    grids: list[Grid]
    pixels: list[Rows]
    eps: float = RMS_NORM_EPS


@dataclass(frozen=True)
class Distance:
    """How far an output is from its yardstick."""

    relative: float
    max_abs: float
    min_cosine: float

    @classmethod
    def of(cls, found: Tensor, expected: Tensor) -> "Distance":
        found, expected = found.double(), expected.double()
        difference = found - expected
        cosine = torch.cosine_similarity(found, expected, dim=1)
        return cls(float(difference.norm() / expected.norm()), float(difference.abs().max()), float(cosine.min()))

    @property
    def passes_f32(self) -> bool:
        return self.relative <= 1e-5 and self.max_abs <= 1e-4

    @property
    def passes_bf16(self) -> bool:
        return self.relative <= 3e-2 and self.min_cosine >= 0.999


def spec_of(model: str) -> EncoderSpec:
    return read_spec(GOLDEN / f"{model}-f32")


@cache
def expected_of(model: str) -> dict[str, Tensor]:
    return load_file(GOLDEN / MANIFEST["models"][model]["expected"])


def cases(model: str, precision: str) -> Iterator[Case]:
    """Every case of a model: images alone, the packed batch, other epsilons, frames."""
    record, stored = MANIFEST["models"][model], expected_of(model)
    for image in record["emb_images"]:
        yield Case(f"{image}/emb", *_items([image], record["kind"]))
    yield Case("batch/emb", *_items(record["batch_images"], record["kind"]))
    for suffix, eps in EPS.items():
        for image in record["eps_images"] if suffix else []:
            if f"{image}/emb_{precision}{suffix}" in stored:
                yield Case(f"{image}/emb{suffix}", *_items([image], record["kind"]), eps)
    if "temporal/grid_thw" in stored:
        yield Case("temporal/emb", *_frames(stored))


def run(
    model: str, precision: str, group: TPGroup, *, dtype: Dtype | None = None, max_patches: int = 10**9
) -> dict[str, Tensor]:
    """Case name -> tokens on rank 0, nothing on other ranks; cases over `max_patches` are left out.

    `dtype` other than the checkpoint's casts the weights.
    """
    folder, dtype = GOLDEN / f"{model}-{precision}", dtype or DTYPES[precision]
    spec = read_spec(folder)
    runners: dict[float, Runner] = {}
    results = {}
    for case in cases(model, precision):
        if sum(grid.num_patches for grid in case.grids) > max_patches:
            continue
        if case.eps not in runners:
            runners[case.eps] = Runner.load(folder, spec, dtype=dtype, rms_norm_eps=case.eps, group=group)
        tokens = encode(runners[case.eps], case.grids, case.pixels, writes=group.rank == 0)
        results |= {case.name: torch.cat(tokens)} if tokens else {}
    return results


def encode(runner: Runner, grids: list[Grid], pixels: list[Rows], *, writes: bool = True) -> list[Tensor]:
    """One batch's tokens, a tensor per image."""
    dtype: torch.dtype = getattr(torch, runner.dtype)
    width = runner.spec.text_hidden_size * dtype.itemsize
    outputs = [np.empty((grid.num_tokens, width), np.uint8) for grid in grids]
    report = runner.encode(grids, pixels, outputs if writes else None)
    assert report.non_finite == ()
    return [torch.from_numpy(output).view(dtype) for output in outputs] if writes else []


def image_item(image: str, kind: str = "k3") -> tuple[Grid, Rows]:
    """Grid and packed rows of a golden image."""
    (grid,), (rows,) = _items([image], kind)
    return grid, rows


def to_rows(frames: Rows) -> Rows:
    """[t, 14 h, 14 w, 3] -> [t h w, 588], rows in the order (token row, token column, frame, 2, 2)."""
    frames_, height, width, _ = frames.shape
    blocks = frames.reshape(frames_, height // 28, 2, 14, width // 28, 2, 14, 3)
    return np.ascontiguousarray(blocks.transpose(1, 4, 0, 2, 5, 7, 3, 6)).reshape(-1, 588)


def row_order(grid: Grid) -> Tensor:
    """Index of each packed row in the row-major order (frame, row, column)."""
    index = torch.arange(grid.num_patches).view(grid.t, grid.h // 2, 2, grid.w // 2, 2)
    return index.permute(1, 3, 0, 2, 4).flatten()


def _items(images: list[str], kind: str) -> tuple[list[Grid], list[Rows]]:
    pictures = [_padded_rgb(image, kind) for image in images]
    grids = [Grid(1, picture.shape[0] // 14, picture.shape[1] // 14) for picture in pictures]
    return grids, [to_rows(picture[None]) for picture in pictures]


def _frames(stored: dict[str, Tensor]) -> tuple[list[Grid], list[Rows]]:
    grids = [Grid(*grid) for grid in stored["temporal/grid_thw"].tolist()]
    parts = stored["temporal/frames_u8"].split([grid.num_patches * 588 for grid in grids])
    sizes = [(grid.t, 14 * grid.h, 14 * grid.w, 3) for grid in grids]
    return grids, [to_rows(part.numpy().reshape(size)) for part, size in zip(parts, sizes, strict=True)]


@cache
def _padded_rgb(image: str, kind: str) -> Rows:
    record = MANIFEST["images"][image]["preprocess"][f"{kind}.published"]
    if "padded_rgb_png" in record:
        return np.array(Image.open(GOLDEN / record["padded_rgb_png"]).convert("RGB"))
    picture = Image.open(GOLDEN / MANIFEST["images"][image]["file"])
    if kind == "k3" and picture.mode == "RGBA":
        picture = _on_chessboard(_resized(picture, record))
    if kind == "kvl":
        rgb = np.array(_padded(picture, record).convert("RGB"))
    else:
        rgb = np.array(_padded(_resized(picture.convert("RGB"), record), record))
    assert hashlib.sha256(rgb.tobytes()).hexdigest() == record["padded_rgb_sha256"], image
    return rgb


def _resized(picture: Image.Image, record: dict[str, Any]) -> Image.Image:
    return picture.resize(tuple(record["new_wh"]), Image.Resampling.BICUBIC)


def _padded(picture: Image.Image, record: dict[str, Any]) -> Image.Image:
    (width, height), (right, bottom) = picture.size, record["pad_wh"]
    return picture.crop((0, 0, width + right, height + bottom))


def _on_chessboard(picture: Image.Image) -> Image.Image:
    rgba = np.array(picture).astype(np.float32)
    y, x = np.indices(rgba.shape[:2]) // 8
    board = np.where((x + y) % 2, np.float32(180), np.float32(255))[..., None]
    alpha = rgba[..., 3:] / np.float32(255)
    return Image.fromarray((alpha * rgba[..., :3] + (1 - alpha) * board).astype(np.uint8))
