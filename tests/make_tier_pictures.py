"""Makes the pictures and tables of service/docs/choosing-a-policy.md: what the model sees of one page at each tier.

The page is an A4 sheet at 300 dpi with text of several sizes and the project's photograph. It goes through the very
geometry, resize and patches of the service (`service.geometry`, `service.image`); what is shown are those patches, put
back together. `PYTHONPATH=.:tests python tests/make_tier_pictures.py` writes all of it (10 s).
"""

import io
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from make_photograph import PHOTOGRAPH
from PIL import Image, ImageDraw, ImageFont, ImageOps
from tables import write_tables

from service.geometry import Fit, ImagePlan, plan_image
from service.image import write_patches
from service.plan import TierPlan, plan_capacity
from tp.settings import Settings, load_settings
from tp.spec import CHANNELS, PUBLISHED_K3

FOLDER = Path(__file__).resolve().parents[1] / "service" / "docs"
PAGE = FOLDER / "choosing-a-policy.md"
TIERS = (1024, 4096, 16384, 65536)
DPI = 300
SHEET = (2480, 3508)  # A4
POINTS = (6, 8, 10, 12, 18)
CROPS = ((150, 1420, 850, 1790), (1130, 500, 1500, 870))  # of the sheet: its lines of text, a part of its photograph
PICTURES = (  # what people send, and its size in pixels
    ("screenshot, 1080p", (1920, 1080)),
    ("screenshot, 4K", (3840, 2160)),
    ("photograph, 12 megapixels", (4032, 3024)),
    ("photograph, 48 megapixels", (8064, 6048)),
    ("A4 scan, 150 dpi", (1240, 1754)),
    ("A4 scan, 300 dpi", SHEET),
)
_TEXT = "Invoice 7,204.18 due 03/11; part 8B-O0l1"


def font(points: float) -> ImageFont.FreeTypeFont:
    """Pillow's own, at the sheet's resolution."""
    found = ImageFont.load_default(points * DPI / 72)
    assert isinstance(found, ImageFont.FreeTypeFont), "Pillow is built without FreeType"
    return found


def make_sheet() -> Image.Image:
    """The A4 page, in grey."""
    sheet = Image.new("L", SHEET, 255)
    with Image.open(PHOTOGRAPH) as photograph:
        sheet.paste(ImageOps.fit(photograph.convert("L"), (2180, 1220)), (150, 150))
    draw = ImageDraw.Draw(sheet)
    top = 1450
    while top < 3300:
        for points in POINTS:
            draw.text((170, top), f"{points} pt  {_TEXT}", 0, font(points))
            top += round(points * DPI / 72 * 1.35)
        top += 60
    return sheet


@cache
def sheet_file() -> bytes:
    """The sheet as a client would send it."""
    file = io.BytesIO()
    make_sheet().save(file, "PNG")
    return file.getvalue()


def plan_under(size: tuple[int, int], top_tier: int) -> ImagePlan:
    """What a service with this top tier and policy `downscale` makes of a picture."""
    tiers = [tier for tier in TIERS if tier <= top_tier]
    return plan_image(*size, PUBLISHED_K3.processor, tiers, "downscale")


def seen(plan: ImagePlan) -> Image.Image:
    """The sheet as the encoder gets it: the patches that the service writes, put back together, without the padding."""
    patch = PUBLISHED_K3.processor.patch_size
    rows = np.empty((plan.patches, CHANNELS * patch**2), np.uint8)
    write_patches(sheet_file(), plan, PUBLISHED_K3.processor, orientation="apply", gray16="scale", out=rows)
    return Image.fromarray(put_together(rows, plan.fit)).crop((0, 0, *plan.encoded_size))


def put_together(rows: npt.NDArray[np.uint8], fit: Fit) -> npt.NDArray[np.uint8]:
    """Patches [h * w, 588] in the service's order -> the padded picture [height, width, 3]."""
    patch, (_, h, w) = fit.patch_size, fit.grid
    # [h * w, 588] -> [token row, token column, row in it, column in it, channel, row, column]
    split = rows.reshape(h // 2, w // 2, 2, 2, CHANNELS, patch, patch)
    return split.transpose(0, 2, 5, 1, 3, 6, 4).reshape(h * patch, w * patch, CHANNELS)


def picture_of(tier: int) -> Image.Image:
    """Two parts of the sheet under one top tier, magnified to the size that they have on it, pixel by pixel."""
    plan = plan_under(SHEET, tier)
    page = seen(plan).convert("L")
    scale = plan.encoded_size[0] / SHEET[0]
    parts = [
        page.resize(
            (right - left, bottom - top),
            Image.Resampling.NEAREST,
            box=(left * scale, top * scale, right * scale, bottom * scale),
        )
        for left, top, right, bottom in CROPS
    ]
    picture = Image.new("L", (sum(part.width for part in parts), parts[0].height))
    picture.paste(parts[0], (0, 0))
    picture.paste(parts[1], (parts[0].width, 0))
    return picture.quantize(24)  # keeps the file small


def tiers_table() -> str:
    """What each top tier makes of the sheet, and what it costs."""
    x_height = [font(points).getbbox("x") for points in POINTS]
    heights = [(box[3] - box[1]) for box in x_height]
    lines = [
        "| top tier | the page becomes | tokens | "
        + " | ".join(f"x of {points} pt" for points in POINTS)
        + " | TFLOPs | slab | scratch a rank |",
        "|---" * (6 + len(POINTS)) + "|",
    ]
    for tier, cost in zip(TIERS, costs(), strict=True):
        plan = plan_under(SHEET, tier)
        scale = plan.encoded_size[0] / SHEET[0]
        cells = [
            f"{tier:,}",
            f"{plan.encoded_size[0]:,} x {plan.encoded_size[1]:,}{'' if plan.downscaled else ', untouched'}",
            f"{plan.grid.num_tokens:,}",
            *(f"{height * scale:.1f} px" for height in heights),
            f"{PUBLISHED_K3.flops(plan.patches) / 1e12:.1f}",
            f"{cost.slab_bytes / 1e6:,.0f} MB",
            f"{cost.scratch_bytes / 1e6:,.0f} MB",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def costs() -> Sequence[TierPlan]:
    """Of published K3 over two GPUs in bfloat16, with each tier as the top one."""
    return plan_capacity(PUBLISHED_K3, settings(), num_cores=1).tiers


def settings() -> Settings:
    """Those that the tables are of."""
    flags: dict[str, Any] = {"capacity.patch_capacities": list(TIERS), "parallel.tensor": 2, "parallel.device": "cuda"}
    return load_settings(environ={}, flags=flags).settings


def pictures_table() -> str:
    """What becomes of common pictures."""
    lines = [
        "| picture | its patches | " + " | ".join(f"top tier {tier:,}" for tier in TIERS) + " |",
        "|---" * (2 + len(TIERS)) + "|",
    ]
    for name, size in PICTURES:
        own = plan_image(*size, PUBLISHED_K3.processor, [2**20], "refuse")
        plans = [plan_under(size, tier) for tier in TIERS]
        cells = [
            f"{plan.encoded_size[0]:,} x {plan.encoded_size[1]:,} ({plan.scale:.0%})" if plan.downscaled else "fits"
            for plan in plans
        ]
        lines.append(f"| {name}: {size[0]:,} x {size[1]:,} | {own.patches:,} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


TABLES: dict[str, Callable[[], str]] = {"tiers": tiers_table, "pictures": pictures_table}


def picture_path(tier: int) -> Path:
    """Where a tier's picture lies."""
    return FOLDER / f"tier-{tier}.png"


if __name__ == "__main__":
    for each in TIERS:
        picture_of(each).save(picture_path(each), optimize=True)
    write_tables(PAGE, TABLES)
