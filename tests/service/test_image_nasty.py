"""Every file of tests/data/nasty through header, plan and pixels, against the outcomes its manifest accepts."""

import json
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from service.errors import ImageTooLarge, ServiceError, UndecodableImage, UnsupportedImage
from service.geometry import ImagePlan, plan_image
from service.header import read_header
from service.image import write_patches
from tp.spec import Background, ProcessorSpec

NASTY = Path(__file__).parents[1] / "data" / "nasty"
FILES = {entry["file"]: entry for entry in json.loads((NASTY / "manifest.json").read_text())["files"]}
CAPACITIES = (256, 1024, 4096)
MAX_PIXELS = 89_478_485

HALF = (0.5, 0.5, 0.5)
K3 = ProcessorSpec("navit", 14, 65536, 512, HALF, HALF, Background("chessboard", 8, True, 255, 180), "after_resize")

# The manifest also accepts a refusal of formats that a service may choose not to read. These we read.
READ = ("tiff_o6.tif", "gray16_le.tif", "white_is_zero.tif", "multipage.tif", "topdown.bmp", "plain.avif")
# Files that are damaged in a way that a decoder may or may not notice.
EITHER_WAY = ("png_bad_idat_crc.png", "fuzz_jpeg_0.jpg", "jpeg_no_eoi.jpg")


def _run(name: str) -> tuple[ImagePlan, np.ndarray]:
    """The plan, and the encoded picture [height, width, 3] without padding."""
    data = (NASTY / name).read_bytes()
    header = read_header(data, orientation="apply", max_pixels=MAX_PIXELS)
    plan = plan_image(header.width, header.height, K3, CAPACITIES, "downscale")
    out = np.full((plan.patches, 588), 77, np.uint8)
    write_patches(data, plan, K3, orientation="apply", gray16="scale", out=out)
    _, h, w = plan.grid
    padded = out.reshape(h // 2, w // 2, 2, 2, 3, 14, 14).transpose(0, 2, 5, 1, 3, 6, 4).reshape(h * 14, w * 14, 3)
    assert not padded[plan.encoded_size[1] :].any()
    assert not padded[:, plan.encoded_size[0] :].any()
    return plan, padded[: plan.encoded_size[1], : plan.encoded_size[0]]


@pytest.fixture(autouse=True)
def silence(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing that a client sends may reach stderr or a log."""
    with warnings.catch_warnings(), caplog.at_level("DEBUG"):
        warnings.simplefilter("error")
        yield
    assert capfd.readouterr() == ("", "")
    assert not caplog.records


@pytest.mark.parametrize("name", FILES)
def test_outcome_size_and_pixels(name: str) -> None:
    entry = FILES[name]
    try:
        plan, picture = _run(name)
    except (UnsupportedImage, UndecodableImage, ImageTooLarge) as error:
        assert "client_error" in entry["accept"]
        assert name not in READ
        assert name in EITHER_WAY or entry["expected"] == "client_error" or isinstance(error, UnsupportedImage)
        assert len(str(error.as_dict())) < 300
        return
    assert ("ok_downscaled" if plan.downscaled else "ok") in entry["accept"]
    assert list(plan.original_size) == entry.get("size", list(plan.original_size))
    for x, y, colour, tolerance in entry.get("probes", []):
        column, row = (p * e // o for p, e, o in zip((x, y), plan.encoded_size, plan.original_size, strict=True))
        seen = picture[row, column]
        assert np.abs(seen.astype(int) - colour).max() <= tolerance, (x, y, seen)


@pytest.mark.parametrize("name", [name for name, entry in FILES.items() if entry.get("same_as", name) != name])
def test_the_same_picture_in_another_file_has_the_same_pixels(name: str) -> None:
    """In place of comparing embeddings, whose least cosine the manifest gives."""
    (plan, picture), (expected_plan, expected) = _run(name), _run(FILES[name]["same_as"])
    assert plan.grid == expected_plan.grid
    bound = {0.95: 8, 0.98: 3, 0.99: 1, 0.999: 0, 0.9999: 0}[FILES[name]["min_cos"]]
    assert np.abs(picture.astype(int) - expected).mean() <= bound


@pytest.mark.parametrize("name", ["anim.gif", "anim.webp", "anim.png", "multipage.tif", "phone.mpo.jpg"])
def test_the_first_frame_is_the_picture(name: str) -> None:
    _, expected = _run("ref_quad.png")
    assert np.abs(_run(name)[1].astype(int) - expected).mean() < 10


@pytest.mark.parametrize("name", ["gif_all_transparent.gif", "alpha_all_zero.png"])
def test_a_wholly_transparent_picture_is_the_chessboard(name: str) -> None:
    _, picture = _run(name)
    cells = np.add.outer(np.arange(64) // 8, np.arange(64) // 8) % 2
    assert np.array_equal(picture, np.where(cells, 180, 255)[:, :, None].repeat(3, axis=2))


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("still.heic", UnsupportedImage),
        ("float32.tif", UnsupportedImage),
        ("lab.tif", UnsupportedImage),
        ("ztxt_bomb.png", UndecodableImage),
        ("png_zero_width.png", UndecodableImage),
        ("jpeg_half.jpg", UndecodableImage),
        ("bomb_palette_12000x9000.png", ImageTooLarge),
    ],
)
def test_the_error_says_what_is_wrong(name: str, error: type[ServiceError]) -> None:
    with pytest.raises(error):
        _run(name)


@pytest.mark.parametrize("name", [name for name, entry in FILES.items() if entry.get("header_px", 0) > MAX_PIXELS])
def test_bombs_are_refused_on_the_header(name: str) -> None:
    expected = UnsupportedImage if name.endswith(".ppm") else ImageTooLarge
    with pytest.raises(expected) as caught:
        read_header((NASTY / name).read_bytes(), orientation="apply", max_pixels=MAX_PIXELS)
    if expected is ImageTooLarge:
        assert caught.value.numbers == {"pixels": FILES[name]["header_px"], "limit": MAX_PIXELS}


def test_refusing_bombs_takes_no_memory() -> None:
    """In a process of its own, whose peak resident memory is its own."""
    script = f"""
        import resource, sys
        from pathlib import Path
        from service.errors import ServiceError
        from service.header import read_header
        files = [path.read_bytes() for path in sorted(Path({str(NASTY)!r}).iterdir())]
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for data in files:
            try:
                read_header(data, orientation="apply", max_pixels={MAX_PIXELS})
            except ServiceError:
                pass
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True, timeout=60)
    assert int(done.stdout) < 5 * 1024  # KiB, over every file of the set
    assert done.stderr == ""


def test_a_good_picture_after_all_the_bad_ones_is_as_before() -> None:
    _, before = _run("ref_quad.png")
    for name in FILES:
        try:
            _run(name)
        except ServiceError:
            continue
    assert np.array_equal(_run("ref_quad.png")[1], before)
    assert Image.MAX_IMAGE_PIXELS is None
