"""One picture in every kind of file that we read, against its own pixels: no decoder says here what is right.

Files that Pillow cannot write are put together by hand. Lossy ones may differ by a mean of a few values; a wrong turn,
polarity, palette or frame differs by over 40.
"""

import io
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from service.errors import ImageTooLarge, ServiceError, UndecodableImage, UnsupportedImage
from service.geometry import plan_image
from service.header import read_header
from service.image import write_patches
from tp.spec import Background, ProcessorSpec

HALF = (0.5, 0.5, 0.5)
RULE = ProcessorSpec("navit", 14, 16384, 512, HALF, HALF, Background("chessboard", 8, True, 255, 180), "after_resize")
WIDTH, HEIGHT = 44, 30
Pixels = NDArray[Any]
LOSSLESS, LOSSY = 0.0, 12.0


def picture(width: int = WIDTH, height: int = HEIGHT) -> Pixels:
    """[height, width, 3] uint8: a colour in each quarter, and no quarter is flat."""
    rows, columns = np.mgrid[:height, :width]
    quarter = np.where(rows < height // 2, 0, 2) + np.where(columns < width // 2, 0, 1)
    colours = np.array([(230, 20, 20), (20, 190, 40), (20, 40, 220), (225, 225, 225)], np.uint8)
    return colours[quarter] + (rows + columns)[..., None].astype(np.uint8) % 16


RGB = picture()
GREY = (np.mgrid[:HEIGHT, :WIDTH][1] * 4 + np.mgrid[:HEIGHT, :WIDTH][0]).astype(np.uint8)
ALPHA = np.where(np.mgrid[:HEIGHT, :WIDTH][0] < HEIGHT // 2, 255, 0).astype(np.uint8)  # the lower half is transparent
CELLS = np.add.outer(np.arange(HEIGHT) // 8, np.arange(WIDTH) // 8) % 2
CHESSBOARD = np.where(CELLS, 180, 255).astype(np.uint8)[..., None].repeat(3, axis=2)


def as_rgb(grey: Pixels) -> Pixels:
    return grey.astype(np.uint8)[..., None].repeat(3, axis=2)


def over_chessboard(rgb: Pixels) -> Pixels:
    return np.where(ALPHA[..., None] > 0, rgb, CHESSBOARD)


def seen(data: bytes) -> Pixels:
    """What the encoder sees of a file, [height, width, 3] without its padding."""
    header = read_header(data, orientation="apply", max_pixels=1 << 24)
    plan = plan_image(header.width, header.height, RULE, (1 << 16,), "refuse")
    out = np.full((plan.patches, 588), 77, np.uint8)
    write_patches(data, plan, RULE, orientation="apply", gray16="scale", out=out)
    _, h, w = plan.grid
    padded = out.reshape(h // 2, w // 2, 2, 2, 3, 14, 14).transpose(0, 2, 5, 1, 3, 6, 4).reshape(h * 14, w * 14, 3)
    return padded[: header.height, : header.width]


def saved(image: Image.Image | Pixels, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(buffer, kind, **options)
    return buffer.getvalue()


# ---- PNG, by hand

ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
COLOUR_TYPES = {1: 0, 2: 4, 3: 2, 4: 6}  # by channels


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def packed_row(row: Pixels, depth: int) -> bytes:
    """[columns, channels] -> the bytes of a PNG or TIFF row."""
    if depth == 16:
        return row.astype(">u2").tobytes()
    if depth == 8:
        return row.astype(np.uint8).tobytes()
    bits = np.unpackbits(row.astype(np.uint8).reshape(-1, 1), axis=1)[:, 8 - depth :]
    return np.packbits(bits.ravel()).tobytes()


def filtered(rows: Sequence[bytes], step: int) -> bytes:
    """The rows, each under another one of the five filters."""
    out, above = b"", bytes(len(rows[0]) if rows else 0)
    for index, row in enumerate(rows):
        kind = index % 5
        out += bytes([kind])
        for place, value in enumerate(row):
            left = row[place - step] if place >= step else 0
            corner = above[place - step] if place >= step else 0
            up = above[place]
            paeth = min((left, up, corner), key=lambda near: abs(left + up - corner - near))
            out += bytes([(value - (0, left, up, (left + up) // 2, paeth)[kind]) % 256])
        above = row
    return out


def png(
    values: Pixels,
    depth: int = 8,
    *,
    interlaced: bool = False,
    palette: bytes = b"",
    before: bytes = b"",
    idat_bytes: int = 1 << 16,
) -> bytes:
    """A PNG of [rows, columns] or [rows, columns, channels]; `before` is chunks that come before the pixels."""
    samples = values.reshape(*values.shape[:2], -1)
    height, width, channels = samples.shape
    step = max(1, channels * depth // 8)
    stream = b""
    for x, y, dx, dy in ADAM7 if interlaced else ((0, 0, 1, 1),):
        part = samples[y::dy, x::dx]
        if part.size:
            stream += filtered([packed_row(row, depth) for row in part], step)
    header = struct.pack(">IIBBBBB", width, height, depth, 3 if palette else COLOUR_TYPES[channels], 0, 0, interlaced)
    data = zlib.compress(stream)
    pieces = [chunk(b"IDAT", data[start : start + idat_bytes]) for start in range(0, len(data), idat_bytes)]
    head = [chunk(b"IHDR", header), chunk(b"PLTE", palette) if palette else b"", before]
    return b"\x89PNG\r\n\x1a\n" + b"".join([*head, *pieces, chunk(b"IEND", b"")])


def with_alpha(colours: Pixels, full: int) -> Pixels:
    return np.dstack([colours, np.where(ALPHA > 0, full, 0).astype(colours.dtype)])


GREY16 = GREY.astype(np.uint16) * 257
RGB16 = RGB.astype(np.uint16) * 256 + 200
PALETTE = bytes(range(0, 192, 3)) + bytes(range(1, 193, 3)) + bytes(range(2, 194, 3))  # 64 entries of three bytes
INDICES = GREY.astype(int) % 64


def entries(indices: Pixels, palette: bytes = PALETTE) -> Pixels:
    return np.frombuffer(palette, np.uint8).reshape(-1, 3)[indices]


TRNS = chunk(b"tRNS", bytes([255, 0] * 32))  # every second entry is transparent
PNGS: dict[str, tuple[bytes, Pixels]] = {
    **{
        f"grey {depth} bits{' interlaced' * interlaced}": (
            png(GREY >> (8 - depth), depth, interlaced=interlaced),
            as_rgb((GREY >> (8 - depth)) * (255 // (2**depth - 1))),
        )
        for depth in (1, 2, 4, 8)
        for interlaced in (False, True)
    },
    **{
        f"{name} 16 bits{' interlaced' * interlaced}": (png(values, 16, interlaced=interlaced), expected)
        for name, values, expected in (
            ("grey", GREY16, as_rgb(GREY)),
            ("grey and alpha", with_alpha(GREY16, 65535), over_chessboard(as_rgb(GREY))),
            ("RGB", RGB16, RGB),
            ("RGBA", with_alpha(RGB16, 65535), over_chessboard(RGB)),
        )
        for interlaced in (False, True)
    },
    "RGB interlaced": (png(RGB, interlaced=True), RGB),
    "RGBA interlaced": (png(with_alpha(RGB, 255), interlaced=True), over_chessboard(RGB)),
    "grey and alpha interlaced": (png(with_alpha(GREY, 255), interlaced=True), over_chessboard(as_rgb(GREY))),
    **{
        f"palette {depth} bits{' interlaced' * interlaced}": (
            png(INDICES % 2**depth, depth, interlaced=interlaced, palette=PALETTE[: 3 * 2**depth]),
            entries(INDICES % 2**depth),
        )
        for depth in (1, 2, 4, 8)
        for interlaced in (False, True)
    },
    "palette with transparent entries, interlaced": (
        png(INDICES, palette=PALETTE, before=TRNS, interlaced=True),
        np.where((INDICES % 2 == 0)[..., None], entries(INDICES), CHESSBOARD),
    ),
    "palette with a short table of alphas": (
        png(INDICES, palette=PALETTE, before=chunk(b"tRNS", b"\0")),
        np.where((INDICES > 0)[..., None], entries(INDICES), CHESSBOARD),
    ),
    "grey with a transparent value": (
        png(GREY, before=chunk(b"tRNS", struct.pack(">H", 60))),
        np.where((GREY != 60)[..., None], as_rgb(GREY), CHESSBOARD),
    ),
    "pixels in chunks of a byte": (png(RGB, idat_bytes=1), RGB),
    "broken colour profile": (png(RGB, before=chunk(b"iCCP", b"x\0\0not deflated")), RGB),
    "odd gamma and chromaticities": (
        png(RGB, before=chunk(b"gAMA", b"\0\0\0\1") + chunk(b"cHRM", bytes(32)) + chunk(b"sRGB", b"\x09")),
        RGB,
    ),
    "a chunk that nobody knows": (png(RGB, before=chunk(b"prIv", bytes(100_000))), RGB),
    "long texts": (
        png(RGB, before=chunk(b"tEXt", b"k\0" + b"t" * 900_000) + chunk(b"iTXt", b"k\0\0\0\0\0" + b"t")),
        RGB,
    ),
    "rubbish after the end": (png(RGB) + bytes(1000) + png(RGB)[::-1], RGB),
}


@pytest.mark.parametrize("name", PNGS)
def test_a_png(name: str) -> None:
    data, expected = PNGS[name]
    assert np.abs(seen(data).astype(int) - expected).max() <= (1 if "16 bits" in name else 0)


def test_a_colour_key_of_rgb_does_not_count() -> None:
    key = chunk(b"tRNS", struct.pack(">HHH", *(int(value) for value in RGB[0, 0])))
    assert np.array_equal(seen(png(RGB, before=key)), RGB)  # as in the checkpoint's processor


@pytest.mark.parametrize("is_first", [True, False], ids=["the first frame", "no frame"])
def test_the_plain_picture_of_an_apng_is_what_is_seen(is_first: bool) -> None:
    control = struct.pack(">IIIIIHHBB", 0, WIDTH, HEIGHT, 0, 0, 1, 10, 0, 0)
    still = png(RGB, before=chunk(b"acTL", struct.pack(">II", 1, 0)) + (chunk(b"fcTL", control) if is_first else b""))
    other = zlib.compress(filtered([bytes(3 * WIDTH)] * HEIGHT, 3))
    frame = struct.pack(">I", 1) + control[4:]
    more = chunk(b"fcTL", frame) + chunk(b"fdAT", struct.pack(">I", 2) + other)
    assert np.array_equal(seen(still[:-12] + more + still[-12:]), RGB)


# ---- what Pillow writes

TURNS = {2: np.fliplr, 3: lambda a: np.rot90(a, 2), 4: np.flipud, 5: lambda a: a.transpose(1, 0, 2)} | {
    6: lambda a: np.rot90(a, 1),
    7: lambda a: np.rot90(a.transpose(1, 0, 2), 2),
    8: lambda a: np.rot90(a, 3),
}


def stored(orientation: int) -> Pixels:
    """What a camera stores for the upright picture."""
    turn: Callable[[Pixels], Pixels] = TURNS.get(orientation, lambda a: a)
    return np.ascontiguousarray(turn(RGB))


def exif(orientation: int, order: str = "<", *, more: Sequence[tuple[int, int]] = ()) -> bytes:
    """An EXIF block with this tag, by hand."""
    tags = sorted([(274, orientation), *more])
    body = struct.pack(f"{order}H", len(tags))
    for tag, value in tags:
        body += struct.pack(f"{order}HHIHH", tag, 3, 1, value, 0)
    mark = b"II" if order == "<" else b"MM"
    return b"Exif\0\0" + mark + struct.pack(f"{order}HI", 42, 8) + body + bytes(4)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("kind", ["JPEG", "MPO", "PNG", "WEBP", "TIFF"])
def test_every_orientation_comes_out_upright(kind: str, order: str, orientation: int) -> None:
    options: dict[str, Any] = {"exif": exif(orientation, order, more=[(296, 2)])}
    if kind == "MPO":
        options |= {"save_all": True, "append_images": [Image.fromarray(stored(orientation)[::-1])]}
    if kind == "TIFF":
        options = {"tiffinfo": {274: orientation}}
    if kind == "WEBP":
        options["lossless"] = True
    shown = seen(saved(stored(orientation), kind, **options))
    assert np.abs(shown.astype(int) - RGB).mean() <= (LOSSY if kind in ("JPEG", "MPO") else LOSSLESS)


P = Image.fromarray(RGB).quantize(32)
P_SHOWN = np.asarray(P.convert("RGB"))
RGBA = Image.fromarray(with_alpha(RGB, 255))
SAVED: dict[str, tuple[bytes, Pixels, float]] = {
    **{
        f"JPEG {name}": (saved(RGB, "JPEG", quality=95, **options), RGB, LOSSY)
        for name, options in {
            "4:4:4": {"subsampling": 0},
            "4:2:2": {"subsampling": 1},
            "4:2:0": {"subsampling": 2},
            "progressive": {"progressive": True, "subsampling": 0},
            "with restarts": {"restart_marker_blocks": 1},
            "with its own tables": {"optimize": True},
        }.items()
    },
    "JPEG grey": (saved(GREY, "JPEG", quality=95), as_rgb(GREY), LOSSY),
    "JPEG CMYK": (saved(Image.fromarray(RGB).convert("CMYK"), "JPEG", quality=95), RGB, LOSSY),
    "JPEG then rubbish": (saved(RGB, "JPEG") + bytes(70_000) + b"\xff\xd8\xff", RGB, LOSSY),
    "GIF": (saved(P, "GIF", interlace=0), P_SHOWN, LOSSLESS),
    "GIF interlaced": (saved(P, "GIF", interlace=1), P_SHOWN, LOSSLESS),
    "GIF grey": (saved(GREY, "GIF"), as_rgb(GREY), LOSSLESS),
    "GIF then rubbish": (saved(P, "GIF") + bytes(999), P_SHOWN, LOSSLESS),
    "WebP": (saved(RGB, "WEBP", quality=95), RGB, LOSSY),
    "WebP lossless": (saved(RGB, "WEBP", lossless=True), RGB, LOSSLESS),
    "WebP with alpha": (saved(RGBA, "WEBP", lossless=True), over_chessboard(RGB), LOSSLESS),
    "WebP lossy with alpha": (saved(RGBA, "WEBP", quality=95), over_chessboard(RGB), LOSSY),
    "WebP of a palette with transparency": (
        saved(RGBA.quantize(64), "WEBP", lossless=True),
        over_chessboard(np.asarray(RGBA.quantize(64).convert("RGB"))),
        LOSSLESS,
    ),
    "BMP": (saved(RGB, "BMP"), RGB, LOSSLESS),
    "BMP palette": (saved(P, "BMP"), P_SHOWN, LOSSLESS),
    "BMP grey": (saved(GREY, "BMP"), as_rgb(GREY), LOSSLESS),
    "BMP 1 bit": (saved(Image.fromarray(GREY > 90), "BMP"), as_rgb((GREY > 90) * 255), LOSSLESS),
    "AVIF": (saved(RGB, "AVIF", quality=95, subsampling="4:4:4"), RGB, LOSSY),
    "AVIF 4:2:0": (saved(RGB, "AVIF", quality=90), RGB, LOSSY),
    "AVIF grey": (saved(GREY, "AVIF", quality=95), as_rgb(GREY), LOSSY),
    "AVIF with alpha": (saved(RGBA, "AVIF", quality=95), over_chessboard(RGB), LOSSY),
    **{
        f"TIFF {compression}": (saved(RGB, "TIFF", compression=compression), RGB, LOSSLESS)
        for compression in ("raw", "packbits", "tiff_lzw", "tiff_deflate", "tiff_adobe_deflate", "zstd", "lzma")
    },
    "TIFF JPEG": (saved(RGB, "TIFF", compression="jpeg", quality=95), RGB, LOSSY),
    "TIFF predicted": (saved(RGB, "TIFF", compression="tiff_lzw", tiffinfo={317: 2}), RGB, LOSSLESS),
    "TIFF strips": (saved(RGB, "TIFF", strip_size=3 * WIDTH * 4), RGB, LOSSLESS),
    "TIFF big": (saved(RGB, "TIFF", big_tiff=True), RGB, LOSSLESS),
    "TIFF CMYK": (saved(Image.fromarray(RGB).convert("CMYK"), "TIFF"), RGB, 2.0),
    "TIFF YCbCr": (saved(Image.fromarray(RGB).convert("YCbCr"), "TIFF"), RGB, 2.0),
    "TIFF palette": (saved(P, "TIFF"), P_SHOWN, LOSSLESS),
    "TIFF RGBA": (saved(RGBA, "TIFF"), over_chessboard(RGB), LOSSLESS),
    "TIFF grey and alpha": (saved(with_alpha(GREY, 255), "TIFF"), over_chessboard(as_rgb(GREY)), LOSSLESS),
    "TIFF 16-bit grey": (saved(GREY16, "TIFF", compression="tiff_lzw"), as_rgb(GREY), LOSSLESS),
    **{
        f"TIFF {compression}": (
            saved(Image.fromarray(GREY > 90), "TIFF", compression=compression),
            as_rgb((GREY > 90) * 255),
            LOSSLESS,
        )
        for compression in ("group3", "group4", "tiff_ccitt")
    },
}


@pytest.mark.parametrize("name", SAVED)
def test_what_pillow_writes(name: str) -> None:
    data, expected, tolerance = SAVED[name]
    assert np.abs(seen(data).astype(int) - expected).mean() <= tolerance


# ---- BMP, GIF, WebP and TIFF, by hand


def bmp(bits: int, rows: bytes, *, compression: int = 0, after: bytes = b"", height: int = HEIGHT) -> bytes:
    header = struct.pack("<IiiHHIIiiII", 40, WIDTH, height, 1, bits, compression, len(rows), 0, 0, 0, 0)
    offset = 14 + len(header) + len(after)
    return b"BM" + struct.pack("<IHHI", offset + len(rows), 0, 0, offset) + header + after + rows


def bmp_rows(values: Pixels) -> bytes:
    """Bottom row first, each padded to four bytes."""
    return b"".join(row.tobytes() + bytes(-len(row.tobytes()) % 4) for row in values[::-1])


GREY_PALETTE = b"".join(bytes([value, value, value, 0]) for value in range(256))
FIVES = (RGB >> 3).astype("<u2")
R5G6B5 = FIVES[..., 0] << 11 | (RGB[..., 1] >> 2).astype("<u2") << 5 | FIVES[..., 2]
X1R5G5B5 = FIVES[..., 0] << 10 | FIVES[..., 1] << 5 | FIVES[..., 2]
RUNS = b"".join(b"".join(bytes([1, value]) for value in row) + b"\0\0" for row in GREY[::-1]) + b"\0\1"
BGRX = np.dstack([RGB[..., ::-1], np.zeros_like(GREY)])


@pytest.mark.parametrize(
    ("data", "expected", "tolerance"),
    [
        (bmp(16, bmp_rows(X1R5G5B5)), RGB, 8),
        (bmp(16, bmp_rows(R5G6B5), compression=3, after=struct.pack("<III", 0xF800, 0x7E0, 0x1F)), RGB, 8),
        (bmp(32, bmp_rows(BGRX)), RGB, 0),
        (bmp(24, RGB[..., ::-1].tobytes(), height=-HEIGHT), RGB, 0),
        (bmp(8, RUNS, compression=1, after=GREY_PALETTE), as_rgb(GREY), 0),
        (bmp(8, bmp_rows(GREY), after=GREY_PALETTE), as_rgb(GREY), 0),
    ],
    ids=["5-5-5", "5-6-5", "32 bits without alpha", "top row first", "runs", "256 greys"],
)
def test_a_bmp(data: bytes, expected: Pixels, tolerance: int) -> None:
    assert np.abs(seen(data).astype(int) - expected).max() <= tolerance


def gif(frames: Sequence[bytes], *, palette: bytes = b"", size: tuple[int, int] = (WIDTH, HEIGHT)) -> bytes:
    flags = 0x80 | (len(palette) // 3).bit_length() - 2 if palette else 0
    return b"GIF89a" + struct.pack("<HHBBB", *size, flags, 0, 0) + palette + b"".join(frames) + b";"


def gif_frame(
    left: int, top: int, indices: Pixels, *, palette: bytes = b"", clear: int | None = None, disposal: int = 0
) -> bytes:
    """A frame of codes of 9 bits, cleared so often that they never grow."""
    control = b""
    if clear is not None:
        control = b"!\xf9\x04" + struct.pack("<BHBB", disposal << 2 | 1, 0, clear, 0)
    codes: list[int] = []
    for start in range(0, indices.size, 100):
        codes += [256, *indices.ravel()[start : start + 100].tolist()]
    bits = np.array([[code >> place & 1 for place in range(9)] for code in [*codes, 257]], np.uint8)
    data = np.packbits(bits.ravel(), bitorder="little").tobytes()
    flags = 0x80 | (len(palette) // 3).bit_length() - 2 if palette else 0
    blocks = b"".join(bytes([len(data[at : at + 255])]) + data[at : at + 255] for at in range(0, len(data), 255))
    head = b"," + struct.pack("<HHHHB", left, top, indices.shape[1], indices.shape[0], flags)
    return control + head + palette + b"\x08" + blocks + b"\0"


def in_canvas(part: Pixels, left: int, top: int, background: Pixels) -> Pixels:
    whole = background.copy()
    whole[top : top + part.shape[0], left : left + part.shape[1]] = part
    return whole


SMALL = INDICES[:10, :20] % 63


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (gif([gif_frame(0, 0, INDICES, palette=PALETTE)]), entries(INDICES)),
        (gif([gif_frame(0, 0, INDICES, palette=PALETTE)], palette=PALETTE[::-1]), entries(INDICES)),
        (
            gif([gif_frame(0, 0, INDICES, clear=3)], palette=PALETTE),
            np.where((INDICES != 3)[..., None], entries(INDICES), CHESSBOARD),
        ),
        (
            gif([gif_frame(7, 5, SMALL, clear=63)], palette=PALETTE),
            in_canvas(entries(SMALL), 7, 5, CHESSBOARD),
        ),
        (
            gif([gif_frame(0, 0, INDICES), gif_frame(7, 5, SMALL, clear=3, disposal=3)], palette=PALETTE),
            entries(INDICES),
        ),
    ],
    ids=["local palette", "local before global palette", "transparent entry", "part of the canvas", "first of two"],
)
def test_a_gif(data: bytes, expected: Pixels) -> None:
    assert np.array_equal(seen(data), expected)


def test_a_gif_frame_beyond_its_canvas_is_seen_whole() -> None:
    assert seen(gif([gif_frame(0, 0, INDICES, palette=PALETTE)], size=(1, 1))).shape == RGB.shape


def riff(*chunks: tuple[bytes, bytes]) -> bytes:
    body = b"WEBP" + b"".join(
        kind + struct.pack("<I", len(data)) + data + bytes(len(data) % 2) for kind, data in chunks
    )
    return b"RIFF" + struct.pack("<I", len(body)) + body


def three(value: int) -> bytes:
    return struct.pack("<I", value)[:3]


def test_the_first_frame_of_an_animated_webp_has_its_place_on_the_canvas() -> None:
    part = picture(20, 12)
    pixels = saved(part, "WEBP", lossless=True)[12:]
    head = three(6 // 2) + three(8 // 2) + three(19) + three(11) + three(100) + b"\0"
    canvas = b"\x12\0\0\0" + three(WIDTH - 1) + three(HEIGHT - 1)
    other = three(0) * 2 + three(19) + three(11) + three(100) + b"\0"
    data = riff((b"VP8X", canvas), (b"ANIM", bytes(6)), (b"ANMF", head + pixels), (b"ANMF", other + pixels))
    assert np.array_equal(seen(data), in_canvas(part, 6, 8, CHESSBOARD))


def tiff(order: str, tags: dict[int, tuple[int, Sequence[int]]], strips: Sequence[bytes]) -> bytes:
    """Tags are (type, values), 3: 16 bits, 4: 32 bits; those of place, strips and their lengths are made here."""
    extra, start = b"", 2000
    places = [start + sum(map(len, strips[:index])) for index in range(len(strips))]
    tags = tags | {256: (4, [WIDTH]), 257: (4, [HEIGHT]), 273: (4, places), 279: (4, list(map(len, strips)))}
    directory = struct.pack(f"{order}H", len(tags))
    for tag, (kind, values) in sorted(tags.items()):
        packed = struct.pack(f"{order}{len(values)}{'H' if kind == 3 else 'I'}", *values)
        if len(packed) > 4:
            extra, packed = extra + packed, struct.pack(f"{order}I", 1000 + len(extra))
        directory += struct.pack(f"{order}HHI", tag, kind, len(values)) + packed.ljust(4, b"\0")
    mark = b"II" if order == "<" else b"MM"
    head = mark + struct.pack(f"{order}HI", 42, 8) + directory + bytes(4)
    return (head.ljust(1000, b"\0") + extra).ljust(start, b"\0") + b"".join(strips)


def rgb_tags(bits: int, samples: int = 3, **more: Any) -> dict[int, tuple[int, Sequence[int]]]:
    return {258: (3, [bits] * samples), 259: (3, [1]), 262: (3, [2]), 277: (3, [samples]), 278: (4, [HEIGHT])} | {
        int(tag.removeprefix("t")): (3, value) for tag, value in more.items()
    }


GREY_TAGS = {258: (3, [16]), 259: (3, [1]), 262: (3, [1]), 277: (3, [1]), 278: (4, [HEIGHT])}
PREMULTIPLIED = with_alpha(np.where(ALPHA[..., None] > 0, RGB, 0), 255)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize(
    ("tags", "values", "expected"),
    [
        (rgb_tags(8), RGB, RGB),
        (rgb_tags(16), RGB16, RGB),
        (rgb_tags(16, 4, t338=[2]), with_alpha(RGB16, 65535), over_chessboard(RGB)),
        (rgb_tags(8, 4, t338=[2]), with_alpha(RGB, 255), over_chessboard(RGB)),
        (rgb_tags(8, 4, t338=[1]), PREMULTIPLIED, over_chessboard(RGB)),
        (rgb_tags(8, 4, t338=[0]), with_alpha(RGB, 255), RGB),
        (GREY_TAGS, GREY16, as_rgb(GREY)),
    ],
    ids=["RGB", "RGB 16", "RGBA 16", "RGBA", "premultiplied", "RGB and something", "grey 16"],
)
def test_a_tiff(order: str, tags: dict[int, tuple[int, Sequence[int]]], values: Pixels, expected: Pixels) -> None:
    data = tiff(order, tags, [values.astype(f"{order}u{values.dtype.itemsize}").tobytes()])
    assert np.abs(seen(data).astype(int) - expected).max() <= (1 if values.dtype.itemsize == 2 else 0)


def test_planes_of_a_tiff() -> None:
    planes = [np.ascontiguousarray(RGB[..., channel]).tobytes() for channel in range(3)]
    assert np.array_equal(seen(tiff("<", rgb_tags(8, t284=[2]), planes)), RGB)


# ---- broken

WHOLE: dict[str, Callable[[], bytes]] = {
    "PNG interlaced": lambda: png(RGB, interlaced=True),
    "PNG palette": lambda: png(INDICES, palette=PALETTE),
    "PNG 16 bits": lambda: png(RGB16, 16),
    "JPEG": lambda: saved(RGB, "JPEG", quality=95),
    "JPEG progressive": lambda: saved(RGB, "JPEG", quality=95, progressive=True),
    "JPEG CMYK": lambda: saved(Image.fromarray(RGB).convert("CMYK"), "JPEG", quality=95),
    "GIF": lambda: saved(P, "GIF"),
    "WebP": lambda: saved(RGB, "WEBP", quality=95),
    "WebP lossless": lambda: saved(RGB, "WEBP", lossless=True),
    "WebP with alpha": lambda: saved(RGBA, "WEBP", quality=95),
    "BMP": lambda: saved(RGB, "BMP"),
    "BMP runs": lambda: bmp(8, RUNS, compression=1, after=GREY_PALETTE),
    "TIFF": lambda: saved(RGB, "TIFF"),
    "TIFF LZW": lambda: saved(RGB, "TIFF", compression="tiff_lzw"),
    "TIFF strips": lambda: saved(RGB, "TIFF", strip_size=3 * WIDTH * 4),
    "AVIF": lambda: saved(RGB, "AVIF", quality=95),
}


@pytest.fixture
def silence(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    yield
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("tenths", range(10))
@pytest.mark.parametrize("name", WHOLE)
def test_a_file_that_is_cut_is_an_error(name: str, tenths: int, silence: None) -> None:
    whole = WHOLE[name]()
    with pytest.raises((UndecodableImage, UnsupportedImage)):
        seen(whole[: len(whole) * tenths // 10])


@pytest.mark.parametrize("name", WHOLE)
def test_rubbish_before_a_file_makes_it_no_image(name: str) -> None:
    with pytest.raises(UnsupportedImage):
        seen(b"\r\n" + WHOLE[name]())


@pytest.mark.parametrize("name", WHOLE)
def test_every_byte_turned_over_is_a_picture_or_an_error(name: str, silence: None) -> None:
    whole = WHOLE[name]()
    for place in np.random.default_rng(0).integers(0, len(whole), 60).tolist():
        damaged = bytearray(whole)
        damaged[place] ^= 0xFF
        try:
            seen(bytes(damaged))
        except ServiceError as error:
            assert 400 <= error.status < 500


def zero(data: bytes, place: int, num_bytes: int) -> bytes:
    return data[:place] + bytes(num_bytes) + data[place + num_bytes :]


JPEG = saved(RGB, "JPEG")
SOF = JPEG.index(b"\xff\xc0")


@pytest.mark.parametrize(
    "data",
    [
        zero(JPEG, SOF + 5, 2),
        zero(JPEG, SOF + 7, 2),
        JPEG[: SOF + 4] + b"\x0c" + JPEG[SOF + 5 :],
        JPEG[: SOF + 1] + b"\xc3" + JPEG[SOF + 2 :],
        JPEG[: SOF + 9] + b"\x05" + JPEG[SOF + 10 :],
        zero(saved(P, "GIF"), 6, 4)[:13],
        gif([gif_frame(0, 0, INDICES[:0], palette=PALETTE)], size=(0, 0)),
        zero(saved(RGB, "BMP"), 18, 4),
        zero(saved(RGB, "BMP"), 22, 4),
        bmp(24, bmp_rows(RGB), height=-(2**31)),
        bmp(7, bmp_rows(GREY)),
        tiff("<", rgb_tags(8) | {257: (4, [0])}, [b""]),
        tiff("<", rgb_tags(8), []),
        tiff("<", rgb_tags(8) | {259: (3, [9999])}, [RGB.tobytes()]),
        b"II*\0\xff\xff\xff\xff",
        b"RIFF\xff\xff\xff\xffWEBPVP8 ",
        riff((b"VP8X", b"\x12\0\0\0" + three(WIDTH - 1) + three(HEIGHT - 1)), (b"ANIM", bytes(6))),
        png(RGB, before=chunk(b"IHDR", bytes(13))),
        png(INDICES, palette=PALETTE).replace(b"PLTE", b"plTE"),
        png(RGB)[:8] + png(RGB)[33:],
    ],
    ids=range(20),
)
def test_what_cannot_be_a_picture_is_an_error(data: bytes, silence: None) -> None:
    with pytest.raises((UndecodableImage, UnsupportedImage, ImageTooLarge)):
        seen(data)
