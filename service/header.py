"""Image bytes -> format, mode, upright size and orientation, from the header alone: no pixel is decoded.

What counts as an image is decided here: an allow-list of formats, told by their first bytes, and of pixel modes.
Pillow works in `open()` too (WebP, AVIF, TIFF, compressed text), so this runs inside decode processes, as
`service.image` does.

Orientation is the EXIF tag 274, wherever the format keeps it; for AVIF Pillow puts the file's own `irot` and `imir`
there. Anything but 1 to 8 counts as 1, as does broken EXIF. XMP and ImageMagick's raw profiles are not asked: browsers
ignore them too. TIFF is the exception: its decoder turns the picture itself, whatever the setting says.
"""

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from typing import Literal

from PIL import (  # importing a plugin registers its format; no other plugin is ever loaded
    AvifImagePlugin,
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    ImageFile,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)

from service import png, tiff
from service.errors import ImageTooLarge, ServiceError, UndecodableImage, UnsupportedImage

Orientation = Literal["apply", "ignore"]

ACCEPTED = "JPEG, PNG, GIF, WebP, BMP, TIFF or AVIF"

# Pillow's set-up: one thread a picture (there is a decode process per core), nothing of a client's file in a log.
AvifImagePlugin.DEFAULT_MAX_THREADS = 1
logging.getLogger("PIL").setLevel(logging.CRITICAL)

_START_OF_SCAN = b"\xff\xda"
SLOW_S = 1.0  # of CPU, to decode a picture
# What that takes a pixel, measured with Pillow 13 on noise. Each scan of a progressive JPEG goes over all pixels again.
_NS_PER_PIXEL = {"AVIF": 75, "WEBP": 50, "PNG": 25}
_NS_ELSEWHERE = 10
_NS_PER_SCAN = 2
_ORIENTATION_TAG = 274
_BITS_TAG, _PHOTOMETRIC_TAG, _WHITE_IS_ZERO = 258, 262, 0

# Pillow's name of every format we read, as it stands in its registry of openers. An MPO opens as JPEG.
_FORMATS = frozenset(
    plugin.format
    for plugin in (
        JpegImagePlugin.JpegImageFile,
        PngImagePlugin.PngImageFile,
        GifImagePlugin.GifImageFile,
        WebPImagePlugin.WebPImageFile,
        BmpImagePlugin.BmpImageFile,
        TiffImagePlugin.TiffImageFile,
        AvifImagePlugin.AvifImageFile,
    )
)
_MODES = frozenset({"1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "I;16", "I;16B"})

# (offset, first bytes, name); the names in _FORMATS are read, the others are only named in the refusal.
_MAGIC = (
    (0, b"\xff\xd8\xff", "JPEG"),
    (0, b"\x89PNG\r\n\x1a\n", "PNG"),
    (0, b"GIF87a", "GIF"),
    (0, b"GIF89a", "GIF"),
    (8, b"WEBP", "WEBP"),
    (0, b"BM", "BMP"),
    (0, b"II*\0", "TIFF"),
    (0, b"MM\0*", "TIFF"),
    (0, b"II+\0", "TIFF"),
    (0, b"MM\0+", "TIFF"),
    (0, b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG 2000"),
    (0, b"\xff\x4f\xff\x51", "JPEG 2000"),
    (0, b"\0\0\0\x0cJXL \r\n\x87\n", "JPEG XL"),
    (0, b"\xff\x0a", "JPEG XL"),
    (0, b"\0\0\1\0", "ICO"),
    (0, b"%PDF", "PDF"),
    (0, b"%!PS", "EPS"),
    (0, b"\xc5\xd0\xd3\xc6", "EPS"),
    (0, b"8BPS", "PSD"),
    (0, b"qoif", "QOI"),
    (0, b"DDS ", "DDS"),
    (0, b"\x76\x2f\x31\x01", "OpenEXR"),
    (0, b"\x1aE\xdf\xa3", "Matroska or WebM"),
    *((0, b"P%d%c" % (kind, space), "PPM") for kind in range(1, 8) for space in b" \t\r\n"),
)
_ISO_BRANDS = (  # brands of the `ftyp` box, major or compatible
    ((b"avif", b"avis"), "AVIF"),
    ((b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"), "HEIC"),
)


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """What the header says. Width and height are in pixels, upright where orientation is applied."""

    format: str  # Pillow's name: JPEG, MPO, PNG, GIF, WEBP, BMP, TIFF, AVIF
    mode: str  # Pillow's name of the stored pixels
    width: int
    height: int
    orientation: int  # EXIF 1..8: the turn that the decoded pixels still need; 1 under `ignore`
    num_scans: int  # of a progressive JPEG, or markers that look like one; 1 elsewhere
    cpu_s: float = field(default=0.0, compare=False)  # to read it, which comes again before the pixels; see `is_slow`

    @property
    def size(self) -> tuple[int, int]:
        """(width, height)."""
        return self.width, self.height

    @property
    def is_slow(self) -> bool:
        """Whether it is likely to take over `SLOW_S` to decode."""
        ns_per_pixel = _NS_PER_PIXEL.get(self.format, _NS_ELSEWHERE) + _NS_PER_SCAN * self.num_scans
        return self.cpu_s + self.width * self.height * ns_per_pixel / 1e9 > SLOW_S


def read_header(data: bytes, *, orientation: Orientation, max_pixels: int) -> ImageHeader:
    """The header of an encoded image.

    Raises UnsupportedImage (not a format or pixel mode that we read), ImageTooLarge (over `max_pixels`) or
    UndecodableImage (broken).
    """
    return open_image(data, orientation=orientation, max_pixels=max_pixels)[1]


def open_image(data: bytes, *, orientation: Orientation, max_pixels: int) -> tuple[ImageFile.ImageFile, ImageHeader]:
    """Pillow's picture, not loaded yet, at its first frame, with its header. Raises as `read_header`."""
    name = _sniff(data)
    if name not in _FORMATS:
        what = f"{name} is not read" if name else "not an image of a format that is read"
        raise UnsupportedImage(f"{what}; send {ACCEPTED}")
    with decoding(f"{name} image"):
        image = _open(data, name, max_pixels)
        if min(image.size) < 1:
            raise UndecodableImage(f"the {name} image is {image.width} x {image.height} pixels")
        if image.width * image.height > max_pixels:
            raise _too_large(image.width * image.height, max_pixels)
        check_mode(image)
        turn = _orientation(image, data) if orientation == "apply" and name != "TIFF" else 1
    width, height = image.size if turn < 5 else image.size[::-1]
    num_scans = data.count(_START_OF_SCAN) if "progressive" in image.info else 1
    return image, ImageHeader(image.format or name, image.mode, width, height, turn, num_scans)


@contextmanager
def decoding(what: str) -> Iterator[None]:
    """Around every call that parses a client's bytes: no warnings, and one error for all that Pillow may raise.

    That is anything: ValueError, SyntaxError, struct.error, zlib.error, KeyError, MemoryError and more have been seen.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except ServiceError:
            raise
        except Exception as error:
            raise UndecodableImage(f"the {what} is broken and cannot be decoded") from error


def check_mode(image: Image.Image) -> None:
    """Raise UnsupportedImage for pixels that do not turn into RGB in one sensible way.

    Those are floats, 32-bit and signed integers, whose range is unknown, and CIELAB; and TIFF greys of 12 bits or with
    white at zero in 16, which Pillow hands over as if they were plain 16-bit greys.
    """
    mode = image.mode
    odd = False
    if isinstance(image, TiffImagePlugin.TiffImageFile) and mode.startswith("I;16"):
        tags = image.tag_v2
        odd = tags.get(_BITS_TAG) != (16,) or tags.get(_PHOTOMETRIC_TAG) == _WHITE_IS_ZERO
    if odd or mode not in _MODES:
        raise UnsupportedImage(
            f"{image.format} pixels of this kind (mode {mode}) are not read; send 8-bit colour, palette, or 8-bit or "
            "16-bit grey"
        )


def _open(data: bytes, name: str, max_pixels: int) -> ImageFile.ImageFile:
    """Open without decoding. Pillow's own size check is on for just this call, since GIF and WebP allocate in it.

    That check raises at twice its limit: the exact one is the caller's.
    """
    if name == "TIFF" and tiff.longest_table(data) > tiff.MAX_TABLE:
        raise UndecodableImage(f"the TIFF image has a table of more than {tiff.MAX_TABLE} entries")
    Image.MAX_IMAGE_PIXELS = max_pixels
    try:
        return Image.open(BytesIO(data), formats=[name])
    except Image.DecompressionBombError as error:
        raise _too_large(int(re.findall(r"\d+", str(error))[0]), max_pixels) from error
    finally:
        Image.MAX_IMAGE_PIXELS = None


def _too_large(pixels: int, limit: int) -> ImageTooLarge:
    numbers = {"pixels": pixels, "limit": limit}
    return ImageTooLarge(f"the image has {pixels} pixels, the limit is {limit}", numbers=numbers)


def _orientation(image: Image.Image, data: bytes) -> int:
    exif = image.info.get("exif") or (png.find_exif(data) if image.format == "PNG" else None)
    if not exif:
        return 1
    try:
        tags = Image.Exif()
        tags.load(exif)
        value = tags.get(_ORIENTATION_TAG)
    except Exception:  # noqa: BLE001 -- broken EXIF raises anything, and spoils no picture
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _sniff(data: bytes) -> str | None:
    """The format's name by its first bytes, or None."""
    for offset, magic, name in _MAGIC:
        if data.startswith(magic, offset):
            return name
    if data[4:8] == b"ftyp":
        box = data[8 : min(int.from_bytes(data[:4]), 256)]
        brands = {box[start : start + 4] for start in range(0, len(box), 4)}
        return next((name for known, name in _ISO_BRANDS if brands & set(known)), "MP4 or other ISO media")
    return "SVG" if b"<svg" in data[:1024].lower() else None
