"""Image bytes and a plan -> the patches that the encoder reads, written into a given array.

Bit for bit what the checkpoint's own processor makes: for Kimi K3 and K2.5 the steps of the published `media_utils.py`,
for Kimi-VL those of its image processor; under `orientation: ignore` and `gray16: reference`. The other values of these
two settings are the only departures. First frame only, no colour management. Runs inside decode processes, on slab
rows; sizes were settled by `service.geometry`, and nothing here changes them.

Pixels stay uint8 from the decoder to the slab: normalisation is a table on the worker. Only bands of rows are ever
turned into floats, to composite transparency.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import nanoarrow
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile
from PIL.TiffImagePlugin import TiffImageFile

from service import png, tiff
from service.errors import UndecodableImage
from service.geometry import ImagePlan
from service.header import ImageHeader, Orientation, check_mode, decoding, open_image
from tp.spec import CHANNELS, Background, ProcessorSpec

Gray16 = Literal["scale", "reference"]
_Bytes = NDArray[np.uint8]

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_BAND_PIXELS = 1 << 19  # of one band of rows; compositing takes some 50 bytes a pixel
_FLAT = {"black": 0, "white": 255, "gray": 128}


def write_patches(
    data: bytes,
    plan: ImagePlan,
    processor: ProcessorSpec,
    *,
    orientation: Orientation,
    gray16: Gray16,
    out: _Bytes,
    frame: int = 0,
    on_decoded: Callable[[], None] = lambda: None,
) -> None:
    """Decode `data` and write its patches, as `plan` has them, into `out`; `on_decoded` is called in between.

    `out` is uint8 [patches, 3 * 14 * 14], C-contiguous; all rows of this frame are written, which for an image are all.
    Rows are ordered by merged token, row-major over blocks of 28 x 28 pixels, then by frame, then by patch in the
    token: (0, 0), (0, 1), (1, 0), (1, 1). A row is (channel, row, column) of its patch.

    Raises UndecodableImage or UnsupportedImage, after which `out` holds anything.
    """
    patch = processor.patch_size
    assert out.shape == (plan.patches, CHANNELS * patch**2) and out.flags.c_contiguous, out.shape
    image = _decode(data, plan, orientation=orientation, gray16=gray16)
    on_decoded()
    with decoding("image"):
        if processor.fill_stage == "before_resize":
            image = _to_rgb(image, processor.background)
        if image.size != plan.encoded_size:  # resizing to the same size is the identity, also for hidden colours
            image = image.resize(plan.encoded_size, Image.Resampling.BICUBIC)
    # [patches, 588] -> [token row, token column, frame, 2, 2, channel, pixel]
    channels = out.reshape(plan.grid.h // 2, plan.grid.w // 2, plan.grid.t, 2, 2, CHANNELS, patch**2)
    done = 0
    for band in _padded_bands(image, plan, processor):
        rows = slice(done, done + band.height // (2 * patch))
        # A row of a patch is an item, 14 pixels of 4 bytes: copies of whole items are quick. In patches, one byte of
        # each pixel is then kept for each channel, which numpy does many at a time.
        # [pixel rows, columns] -> [token row, 2, row, token column, 2] -> [token row, token column, 2, 2, row]
        items = _stored(band).view(f"V{4 * patch}").reshape(-1, 2, patch, plan.grid.w // 2, 2).transpose(0, 3, 1, 4, 2)
        pixels = np.ascontiguousarray(items).view("<u4").reshape(*items.shape[:-1], patch**2)
        for channel in range(CHANNELS):
            channels[rows, :, frame, :, :, channel] = pixels  # of four bytes the lowest, which is red
            pixels >>= 8
        done = rows.stop


def _stored(image: Image.Image) -> NDArray[np.uint32]:
    """Pillow's own memory of an RGB picture of up to 16 MB, [rows, columns]: red, green, blue and nothing."""
    memory = np.asarray(nanoarrow.c_array(image).child(0).view().buffer(1))
    return memory.view("<u4").reshape(image.height, image.width)


def _decode(data: bytes, plan: ImagePlan, *, orientation: Orientation, gray16: Gray16) -> Image.Image:
    """The first frame, upright where asked, in a mode that resizes and converts as the reference expects."""
    width, height = plan.original_size
    image, header = open_image(data, orientation=orientation, max_pixels=width * height)
    _check_size(header.size, plan)
    with decoding(f"{header.format} image"):
        _load(image, header, data)
        picture = _common_mode(image, gray16)
        if header.orientation != 1:
            picture = picture.transpose(_TURNS[header.orientation])
    _check_size(picture.size, plan)
    return picture


def _check_size(size: tuple[int, int], plan: ImagePlan) -> None:
    if size != plan.original_size:
        raise UndecodableImage(f"the image decodes to {size} pixels, though its header says {plan.original_size}")


def _load(image: ImageFile.ImageFile, header: ImageHeader, data: bytes) -> None:
    if isinstance(image, TiffImageFile):
        if not tiff.has_all_pixels(image):
            raise UndecodableImage("the TIFF image is truncated")
        image.info.pop("xmp", None)  # Pillow would turn the picture by it, after it told the size
        with _quiet_stderr():
            image.load()
    else:
        image.load()
    check_mode(image)
    if header.format == "PNG" and _may_be_cut(image) and not png.has_all_pixels(data):
        raise UndecodableImage("the PNG image is truncated")


def _may_be_cut(image: Image.Image) -> bool:
    """Missing pixels are zero, so a last row with anything in it is proof enough, unless it came in an early pass."""
    last = image.crop((0, image.height - 1, image.width, image.height))
    return bool(image.info.get("interlace")) or last.getbbox(alpha_only=False) is None


def _common_mode(image: Image.Image, gray16: Gray16) -> Image.Image:
    """Modes that the reference never meets, or trips over, become their nearest common one."""
    if image.mode.startswith("I;16"):
        return _scale_gray16(image) if gray16 == "scale" else _native_gray16(image)
    odd = {"La": "LA", "PA": "RGBA"}  # TIFF: premultiplied grey, palette with alpha
    return image.convert(odd[image.mode]) if image.mode in odd else image


def _native_gray16(image: Image.Image) -> Image.Image:
    """I;16B, which Pillow does not resize, as I;16."""
    return image if image.mode == "I;16" else Image.fromarray(np.asarray(image).astype(np.uint16))


def _scale_gray16(image: Image.Image) -> Image.Image:
    """16-bit grey -> L by value // 257, or LA where the file names a transparent value, which only all 16 bits tell."""
    key = image.info.get("transparency")
    bands = [Image.new("L", image.size) for _ in range(1 if key is None else 2)]
    for box in _row_boxes(*image.size):
        values = np.asarray(image.crop(box)).astype(np.uint16)
        bands[0].paste(Image.fromarray((values // 257).astype(np.uint8)), box[:2])
        if key is not None:
            bands[1].paste(Image.fromarray(np.where(values == key, np.uint8(0), np.uint8(255))), box[:2])
    return bands[0] if key is None else Image.merge("LA", bands)


def _to_rgb(image: Image.Image, background: Background | None) -> Image.Image:
    """The whole picture in RGB, for the rule that composites before it resizes."""
    if image.mode == "RGB":
        return image
    if background is None or not _has_alpha(image):
        return image.convert("RGB")
    result = Image.new("RGB", image.size)
    for box in _row_boxes(*image.size):
        result.paste(_rgb(image, box, background), box[:2])
    return result


def _padded_bands(image: Image.Image, plan: ImagePlan, processor: ProcessorSpec) -> Iterator[Image.Image]:
    """The encoded picture in RGB, padded, as bands of whole tokens.

    The padding is black, after the conversion to RGB; for Kimi-VL it is zero in the picture's own mode, before: entry
    0 of a palette, white in CMYK. Pillow's crop gives just that outside a picture.
    """
    width, height = plan.padded_size
    is_padded_before = processor.rule == "kimi_vl" or image.mode == "RGB"  # for RGB it is the same
    for box in _row_boxes(width, height, multiple_of=2 * processor.patch_size):
        _, top, _, bottom = box
        with decoding("image"):
            if is_padded_before:
                band = _rgb(image, box, processor.background)
            else:
                inside = (0, top, image.width, min(bottom, image.height))
                band = _rgb(image, inside, processor.background).crop((0, 0, width, bottom - top))
        yield band


def _rgb(image: Image.Image, box: tuple[int, int, int, int], background: Background | None) -> Image.Image:
    """A part of the picture in RGB. A colour key on RGB itself is ignored, as by the reference."""
    part = image.crop(box)
    if part.mode == "RGB":
        return part
    if background is None or not _has_alpha(part):
        return part.convert("RGB")
    return Image.fromarray(_composite(np.asarray(part.convert("RGBA")), _backdrop(background, box)))


def _has_alpha(image: Image.Image) -> bool:
    return "A" in image.getbands() or "transparency" in image.info


def _composite(rgba: _Bytes, backdrop: NDArray[np.float32]) -> _Bytes:
    """[rows, columns, 4] over [rows, columns, 1]. In float32 in this order, and truncated: the reference's bits."""
    alpha = rgba[..., 3:].astype(np.float32) / np.float32(255)
    colour = rgba[..., :3].astype(np.float32)
    return (alpha * colour + (np.float32(1) - alpha) * backdrop).astype(np.uint8)


def _backdrop(background: Background, box: tuple[int, int, int, int]) -> NDArray[np.float32]:
    """Grey values [rows, columns, 1] of a part of the backdrop, whose origin is the picture's top left corner."""
    left, top, right, bottom = box
    if background.pattern != "chessboard":
        return np.full((bottom - top, right - left, 1), _FLAT[background.pattern], np.float32)
    cells = np.add.outer(np.arange(top, bottom), 0) // background.square_size
    odd = (cells[:, None] + np.arange(left, right) // background.square_size) % 2 == 1
    grey = odd == background.white_top_left
    values = np.where(grey, np.float32(background.gray_value), np.float32(background.white_value))
    return values[:, :, None]


def _row_boxes(width: int, height: int, *, multiple_of: int = 1) -> Iterator[tuple[int, int, int, int]]:
    """Bands of so many whole rows, times something, that cover a picture of that size."""
    rows = max(1, _BAND_PIXELS // (width * multiple_of)) * multiple_of
    for top in range(0, height, rows):
        yield 0, top, width, min(top + rows, height)


@contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Send file descriptor 2 nowhere: libtiff prints to it what it thinks of a client's file. One thread a process."""
    kept = os.dup(2)
    try:
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
