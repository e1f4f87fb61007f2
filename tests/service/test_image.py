"""Bit-exactness with the checkpoint's processor (golden data), and what departs from it on purpose."""

import hashlib
import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from goldens import to_rows
from PIL import Image

from service.errors import ImageTooLarge, UndecodableImage, UnsupportedImage
from service.geometry import ImagePlan, plan_image
from service.header import ImageHeader, read_header
from service.image import write_patches
from tp.model import pixel_table
from tp.spec import ProcessorSpec, parse_processor

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
NO_LIMIT = 1 << 40
CAPACITIES = (1 << 20,)


# Every config by name, `k3.published` and so on: those of the main set are all here too.
CONFIGS = json.loads((GOLDEN / "resize" / "manifest.json").read_text())["configs"]


def _rule(name: str = "k3.published") -> ProcessorSpec:
    config = CONFIGS[name]
    is_kimi_vl = name.startswith("kvl")
    return parse_processor(config if is_kimi_vl else {"media_proc_cfg": config}, is_kimi_vl)


def _records() -> list[Any]:
    return [
        pytest.param(folder / entry["file"], _rule(config), record, id=f"{image}-{config}")
        for folder in (GOLDEN, GOLDEN / "resize")
        for image, entry in json.loads((folder / "manifest.json").read_text())["images"].items()
        for config, record in entry["preprocess"].items()
    ]


def _encode(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def _padded(rows: np.ndarray, plan: ImagePlan) -> np.ndarray:
    """Rows in our order -> the padded picture [height, width, 3]."""
    _, h, w = plan.grid
    tokens = rows.reshape(h // 2, w // 2, 2, 2, 3, 14, 14)
    return tokens.transpose(0, 2, 5, 1, 3, 6, 4).reshape(h * 14, w * 14, 3)


def _run(data: bytes, rule: ProcessorSpec, *, orientation: Any = "apply", gray16: Any = "scale") -> np.ndarray:
    """The padded picture that the encoder sees."""
    header = read_header(data, orientation=orientation, max_pixels=NO_LIMIT)
    plan = plan_image(header.width, header.height, rule, CAPACITIES, "refuse")
    out = np.full((plan.patches, 588), 77, np.uint8)
    write_patches(data, plan, rule, orientation=orientation, gray16=gray16, out=out)
    return _padded(out, plan)


def _pixel_values(padded: np.ndarray, rule: ProcessorSpec) -> np.ndarray:
    """Float32 [n, 3, 14, 14] in row-major patch order, through the table that the ranks use."""
    h, w = padded.shape[0] // 14, padded.shape[1] // 14
    patches = padded.reshape(h, 14, w, 14, 3).transpose(0, 2, 4, 1, 3).reshape(h * w, 3, 14, 14)
    tables = pixel_table(rule, torch.float32).view(3, 256).numpy()
    return np.stack([tables[c][patches[:, c]] for c in range(3)], axis=1)


def _sha256(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


@pytest.mark.parametrize(("path", "rule", "record"), _records())
def test_is_bit_exact_with_the_reference(path: Path, rule: ProcessorSpec, record: dict[str, Any]) -> None:
    data = path.read_bytes()
    header = read_header(data, orientation="ignore", max_pixels=NO_LIMIT)
    if "error" in record:
        with pytest.raises(ImageTooLarge, match="512"):
            plan_image(header.width, header.height, rule, CAPACITIES, "refuse")
        return
    plan = plan_image(header.width, header.height, rule, CAPACITIES, "refuse")
    assert list(plan.encoded_size) == record["new_wh"]
    assert [p - e for p, e in zip(plan.padded_size, plan.encoded_size, strict=True)] == record["pad_wh"]
    assert list(plan.grid)[-len(record["grid"]) :] == record["grid"]
    assert (plan.patches, plan.grid.num_tokens) == (record["n_patches"], record["num_tokens"])

    padded = _run(data, rule, orientation="ignore", gray16="reference")

    assert _sha256(padded) == record["padded_rgb_sha256"]
    assert _sha256(_pixel_values(padded, rule)) == record["pixel_values_sha256"]


def test_rows_are_ordered_by_token_then_by_patch_then_by_channel() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (56, 84, 3), np.uint8)
    rule = _rule()
    plan = plan_image(84, 56, rule, CAPACITIES, "refuse")
    out = np.empty((plan.patches, 588), np.uint8)

    data = _encode(Image.fromarray(pixels))
    write_patches(data, plan, rule, orientation="apply", gray16="scale", out=out)

    token_row, token_column = 1, 2
    for patch, (row, column) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
        top, left = 28 * token_row + 14 * row, 28 * token_column + 14 * column
        expected = pixels[top : top + 14, left : left + 14].transpose(2, 0, 1)
        assert np.array_equal(out[4 * (3 * token_row + token_column) + patch], expected.ravel())


def test_frames_lie_between_the_tokens_rows() -> None:
    """Rows of a chunk are ordered by token, then by frame: frame k of a token takes rows 4 k to 4 k + 4 of it."""
    pictures = np.random.default_rng(1).integers(0, 256, (3, 56, 84, 3), np.uint8)
    rule = _rule("k25.published")
    plan = plan_image(84, 56, rule, CAPACITIES, "refuse", num_frames=3)
    alone = plan_image(84, 56, rule, CAPACITIES, "refuse")
    out = np.full((plan.patches, 588), 77, np.uint8)
    for frame in (2, 0, 1):
        before = out.copy()
        data = _encode(Image.fromarray(pictures[frame]))
        write_patches(data, plan, rule, orientation="apply", gray16="scale", out=out, frame=frame)
        rows = np.empty((alone.patches, 588), np.uint8)
        write_patches(data, alone, rule, orientation="apply", gray16="scale", out=rows)
        by_token = out.reshape(6, 3, 4, 588)
        assert np.array_equal(by_token[:, frame], rows.reshape(6, 4, 588))
        others = [other for other in range(3) if other != frame]
        assert np.array_equal(by_token[:, others], before.reshape(6, 3, 4, 588)[:, others])
    assert np.array_equal(out, to_rows(pictures))


def test_every_byte_is_written_and_padding_is_black() -> None:
    padded = _run(_encode(Image.new("RGB", (30, 29), (9, 9, 9))), _rule())
    assert (padded[:29, :30] == 9).all()
    assert not padded[29:].any()
    assert not padded[:, 30:].any()


# ---- orientation


def _quadrants() -> Image.Image:
    image = Image.new("RGB", (60, 40), (250, 250, 250))
    image.paste((200, 0, 0), (0, 0, 30, 20))
    image.paste((0, 200, 0), (30, 0, 60, 20))
    image.paste((0, 0, 200), (0, 20, 30, 40))
    return image


def _stored(orientation: int) -> Image.Image:
    """What a camera that writes `orientation` stores for the upright picture."""
    inverse = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}
    transpose = inverse.get(orientation)
    return _quadrants() if transpose is None else _quadrants().transpose(Image.Transpose(transpose))


def _exif(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[274] = orientation
    return exif


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(
    ("kind", "options"),
    [("PNG", {}), ("WEBP", {"lossless": True}), ("TIFF", {}), ("TIFF", {"compression": "tiff_lzw"}), ("AVIF", {})],
)
def test_all_orientations_of_all_formats_come_out_upright(orientation: int, kind: str, options: dict[str, Any]) -> None:
    data = _encode(_stored(orientation), kind, exif=_exif(orientation), **options)
    assert read_header(data, orientation="apply", max_pixels=NO_LIMIT).size == (60, 40)
    difference = _run(data, _rule())[:40, :60].astype(int) - np.asarray(_quadrants())
    assert np.abs(difference).mean() < 4  # AVIF is lossy; a wrong turn gives over 50


def test_ignored_orientation_keeps_the_stored_size() -> None:
    data = _encode(_stored(6), "JPEG", exif=_exif(6))
    header = read_header(data, orientation="ignore", max_pixels=NO_LIMIT)
    assert (header.size, header.orientation) == ((40, 60), 1)
    assert _run(data, _rule(), orientation="ignore")[10, 30, 0] > 150


@pytest.mark.parametrize("value", [0, 9, 65535])
def test_an_orientation_out_of_range_counts_as_upright(value: int) -> None:
    data = _encode(_quadrants(), exif=_exif(value))
    assert read_header(data, orientation="apply", max_pixels=NO_LIMIT).orientation == 1


def test_exif_after_the_pixels_of_a_png_counts() -> None:
    body = _exif(6).tobytes()[6:]
    chunk = struct.pack(">I", len(body)) + b"eXIf" + body + struct.pack(">I", zlib.crc32(b"eXIf" + body))
    plain = _encode(_stored(6))
    data = plain[:-12] + chunk + plain[-12:]
    header = read_header(data, orientation="apply", max_pixels=NO_LIMIT)
    assert (header.size, header.orientation) == ((60, 40), 6)
    assert np.array_equal(_run(data, _rule())[:40, :60], np.asarray(_quadrants()))


# ---- 16-bit grey


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bit_grey_is_scaled_before_anything_else(kind: str) -> None:
    values = np.arange(28 * 28, dtype=np.uint16).reshape(28, 28) * 83
    padded = _run(_encode(Image.fromarray(values), kind), _rule())
    assert np.array_equal(padded, np.repeat((values // 257).astype(np.uint8)[:, :, None], 3, axis=2))


def test_sixteen_bit_grey_of_a_big_endian_tiff() -> None:
    pixels = np.full((28, 28), 0x8000, ">u2").tobytes()
    data = _tiff(big_endian=True, bits=16, photometric=1, pixels=pixels)
    assert read_header(data, orientation="apply", max_pixels=NO_LIMIT).mode == "I;16B"
    assert (_run(data, _rule()) == 127).all()
    assert (_run(data, _rule(), gray16="reference") == 255).all()


def test_sixteen_bit_grey_keeps_its_transparent_value() -> None:
    values = np.full((28, 28), 0x8001, np.uint16)
    values[:14] = 0x8000
    data = _encode(Image.fromarray(values))
    data = _insert_chunk(data, b"tRNS", struct.pack(">H", 0x8000))
    padded = _run(data, _rule())
    assert (padded[14:] == 127).all()
    assert set(np.unique(padded[:14])) == {180, 255}  # the chessboard shows


# ---- modes


def test_adobe_cmyk_has_the_right_polarity() -> None:
    data = _encode(Image.new("RGB", (28, 28), (220, 30, 40)).convert("CMYK"), "JPEG", quality=95)
    assert b"Adobe" in data[:64]
    assert np.abs(_run(data, _rule()).astype(int) - [220, 30, 40]).max() < 8


@pytest.mark.parametrize("mode", ["F", "I", "LAB"])
def test_pixels_without_a_sensible_rgb_are_refused_from_the_header(mode: str) -> None:
    with pytest.raises(UnsupportedImage, match=f"mode {mode}"):
        read_header(_encode(Image.new(mode, (4, 4)), "TIFF"), orientation="apply", max_pixels=NO_LIMIT)


@pytest.mark.parametrize(("bits", "photometric"), [(12, 1), (16, 0)])
def test_greys_that_pillow_misreads_are_refused(bits: int, photometric: int) -> None:
    data = _tiff(big_endian=False, bits=bits, photometric=photometric, pixels=bytes(28 * 28 * 2))
    with pytest.raises(UnsupportedImage):
        read_header(data, orientation="apply", max_pixels=NO_LIMIT)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr"])
@pytest.mark.parametrize("rule", ["k3.lim256", "k3.lim256_before", "k25.published", "kvl.published"])
@pytest.mark.parametrize("size", [(1, 1), (3, 900), (700, 29)])
def test_every_mode_passes_every_rule(mode: str, rule: str, size: tuple[int, int]) -> None:
    data = _encode(Image.new(mode, size), "TIFF" if mode in ("CMYK", "YCbCr") else "PNG")
    assert _run(data, _rule(rule)).dtype == np.uint8


def test_hidden_colours_do_not_show() -> None:
    colours = np.random.default_rng(1).integers(0, 256, (300, 300, 4), np.uint8)
    colours[..., 3] = 0
    blank = np.zeros_like(colours)
    for rule in ("k3.published", "k3.lim256", "k3.lim256_before"):
        seen, expected = (_run(_encode(Image.fromarray(pixels)), _rule(rule)) for pixels in (colours, blank))
        assert np.array_equal(seen, expected)


# ---- how long it may take


def test_many_pixels_are_slow() -> None:
    assert not ImageHeader("JPEG", "RGB", 8000, 8000, 1, num_scans=1).is_slow
    assert ImageHeader("PNG", "RGB", 8000, 8000, 1, num_scans=1).is_slow


def test_many_scans_are_slow() -> None:
    data = _encode(Image.new("L", (2000, 2000), 9), "JPEG", progressive=True)
    header = read_header(data, orientation="apply", max_pixels=NO_LIMIT)
    assert (header.num_scans > 1, header.is_slow) == (True, False)
    last = data.rindex(b"\xff\xda")
    data = data[:last] + 150 * data[last:-2] + data[-2:]
    header = read_header(data, orientation="apply", max_pixels=NO_LIMIT)
    assert (header.num_scans > 150, header.is_slow) == (True, True)


# ---- broken, foreign and oversized


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"", "not an image"),
        (b"hello", "not an image"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "HEIC"),
        (b"\0\0\0\x18ftypisom\0\0\0\0isommp41", "ISO media"),
        (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG 2000"),
        (b"\0\0\1\0\1\0", "ICO"),
        (b"<?xml version='1.0'?><SVG width='1'>", "SVG"),
        (b"%PDF-1.7", "PDF"),
        (b"%!PS-Adobe-3.0 EPSF-3.0", "EPS"),
        (b"8BPS\0\1", "PSD"),
        (b"P6\n1 1\n255\n", "PPM"),
    ],
)
def test_other_formats_are_refused_by_name(data: bytes, name: str) -> None:
    with pytest.raises(UnsupportedImage, match=name) as caught:
        read_header(data, orientation="apply", max_pixels=NO_LIMIT)
    assert "JPEG, PNG, GIF, WebP, BMP, TIFF or AVIF" in caught.value.message


def test_pixels_are_counted_on_the_header() -> None:
    data = _encode(Image.new("1", (1000, 1000)))
    assert read_header(data, orientation="apply", max_pixels=1_000_000).size == (1000, 1000)
    with pytest.raises(ImageTooLarge) as caught:
        read_header(data, orientation="apply", max_pixels=999_999)
    assert caught.value.numbers == {"pixels": 1_000_000, "limit": 999_999}


@pytest.mark.parametrize("kind", ["GIF", "WEBP"])
def test_formats_that_allocate_on_opening_are_bounded_there(kind: str) -> None:
    data = bytearray(_encode(Image.new("P" if kind == "GIF" else "RGB", (8, 8)), kind))
    if kind == "GIF":
        frame = data.index(b",")
        data[frame + 5 : frame + 9] = struct.pack("<HH", 65535, 65535)
    else:
        data[26:30] = struct.pack("<HH", 16383, 16383)
    with pytest.raises(ImageTooLarge) as caught:
        read_header(bytes(data), orientation="apply", max_pixels=1000)
    assert caught.value.numbers == {"pixels": 65535**2 if kind == "GIF" else 16383**2, "limit": 1000}


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "AVIF"])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.8, 0.95])
def test_truncated_files_are_errors(kind: str, share: float) -> None:
    noise = Image.fromarray(np.random.default_rng(2).integers(0, 256, (80, 80, 3), np.uint8))
    data = _encode(noise, kind)
    with pytest.raises(UndecodableImage):
        _run(data[: int(len(data) * share)], _rule())


@pytest.mark.parametrize("interlaced", [False, True])
@pytest.mark.parametrize("mode", ["1", "L", "RGB", "RGBA", "I;16"])
def test_a_png_whose_stream_ends_early_but_cleanly_is_an_error(mode: str, interlaced: bool) -> None:
    colour, depth = {"1": (0, 1), "L": (0, 8), "RGB": (2, 8), "RGBA": (6, 8), "I;16": (0, 16)}[mode]
    whole = _png(colour=colour, depth=depth, interlaced=interlaced)
    assert not _run(whole, _rule("k25.published")).any()  # black to the last row, and complete
    with pytest.raises(UndecodableImage, match="truncated"):
        _run(_png(colour=colour, depth=depth, interlaced=interlaced, missing_rows=2), _rule())


def test_a_tiff_that_leaves_out_strips_is_an_error() -> None:
    whole = _tiff(big_endian=False, bits=8, photometric=1, pixels=bytes([200] * 784))
    assert (_run(whole, _rule()) == 200).all()
    rows_per_strip = struct.pack("<HHI", 278, 4, 1)
    with pytest.raises(UndecodableImage, match="truncated"):
        _run(whole.replace(rows_per_strip + struct.pack("<I", 28), rows_per_strip + struct.pack("<I", 14)), _rule())


def test_a_tiff_of_a_million_strips_is_refused_before_pillow_lists_them() -> None:
    data = _tiff(big_endian=False, bits=8, photometric=1, pixels=bytes(1 << 22))
    data = data.replace(struct.pack("<HHII", 273, 4, 1, 200), struct.pack("<HHII", 273, 4, 1 << 20, 200))
    with pytest.raises(UndecodableImage, match="table"):
        read_header(data, orientation="apply", max_pixels=NO_LIMIT)


def test_another_size_than_planned_is_an_error() -> None:
    rule = _rule()
    plan = plan_image(30, 30, rule, CAPACITIES, "refuse")
    out = np.empty((plan.patches, 588), np.uint8)
    with pytest.raises(UndecodableImage):
        data = _encode(Image.new("L", (30, 29)))
        write_patches(data, plan, rule, orientation="apply", gray16="scale", out=out)


def test_libtiff_does_not_write_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    data = bytearray(_encode(_quadrants(), "TIFF", compression="tiff_adobe_deflate"))
    data[12:20] = bytes(8)
    with pytest.raises(UndecodableImage):
        _run(bytes(data), _rule())
    assert capfd.readouterr() == ("", "")


# ---- files that Pillow does not write


def _insert_chunk(data: bytes, kind: bytes, body: bytes) -> bytes:
    """After the PNG's header."""
    chunk = struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    return data[:33] + chunk + data[33:]


def _png(*, colour: int, depth: int, interlaced: bool, missing_rows: int = 0) -> bytes:
    """A black PNG, 21 x 33 pixels, whose pixel stream lacks its last rows: whole rows, which Pillow does not miss."""
    bits = depth * {0: 1, 2: 3, 6: 4}[colour]
    passes = [(0, 0, 1, 1)]
    if interlaced:
        passes = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)]
    raw = b""
    for x, y, dx, dy in passes:
        rows = len(range(y, 33, dy)) - (missing_rows if (x, y) == passes[-1][:2] else 0)
        raw += rows * bytes(1 + (len(range(x, 21, dx)) * bits + 7) // 8)
    header = struct.pack(">IIBBBBB", 21, 33, depth, colour, 0, 0, int(interlaced))
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(raw)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )


def _tiff(*, big_endian: bool, bits: int, photometric: int, pixels: bytes) -> bytes:
    """An uncompressed grey TIFF of 28 x 28 pixels in one strip."""
    order = ">" if big_endian else "<"
    tags = ((256, 28), (257, 28), (258, bits), (259, 1), (262, photometric), (273, 200), (278, 28), (279, len(pixels)))
    directory = struct.pack(f"{order}H", len(tags))
    for tag, value in tags:
        directory += struct.pack(f"{order}HHII", tag, 4, 1, value)
    head = (b"MM\0*" if big_endian else b"II*\0") + struct.pack(f"{order}I", 8) + directory
    return head.ljust(200, b"\0") + pixels
