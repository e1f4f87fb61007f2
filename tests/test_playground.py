"""The playground in a real browser, against real services: what it shows is what the API answers."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
import pytest
from browser import Browser, running_browser
from PIL import Image, ImageOps
from proxies import free_port
from running import DATA, GOLDEN, REFERENCE_IMAGES, ROOT, RunningService, ranks_of, wait_until
from selenium.webdriver.common.keys import Keys
from tools import tool

from service.client import Client, Embedding

IMAGES = GOLDEN / "images"
NASTY = DATA / "nasty"
SMALL = IMAGES / "prog_150x110.jpg"
TURNED = IMAGES / "exif6_90x50.jpg"  # stored lying on its side
OTHER = IMAGES / "rgba_120x90.png"
LARGE = IMAGES / "photo_900x700.jpg"
KEY = "only-for-this-test"
A, B = ".panel:nth-child(1)", ".panel:nth-child(2)"
ARGUMENTS = ("--capacities", "64,256,1024")
ROUNDED = 6e-5  # of what is shown to four places

Matrix = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def service(start_service: Any) -> RunningService:
    started: RunningService = start_service(
        *("--model", str(GOLDEN / "tiny-k3-bf16"), *ARGUMENTS), TPVISION_CAPACITY__ALLOW_OVERRIDE="any"
    )
    return started


@pytest.fixture(scope="module")
def guarded(start_service: Any, tmp_path_factory: pytest.TempPathFactory) -> RunningService:
    """It needs a key, lets nobody choose another policy, and turns no picture."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(KEY)
    environ = {**REFERENCE_IMAGES, "TPVISION_SERVER__API_KEYS_FILE": str(keys)}
    started: RunningService = start_service("--model", str(GOLDEN / "tiny-k3-f32"), *ARGUMENTS, **environ)
    return started


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running_browser() as started:
        yield started


@pytest.fixture
def page(browser: Browser, service: RunningService) -> Iterator[Browser]:
    """The playground, in which nothing may go wrong and which may ask nobody else."""
    yield from watched(browser, service.url)


@pytest.fixture
def guarded_page(browser: Browser, guarded: RunningService) -> Iterator[Browser]:
    yield from watched(browser, guarded.url)


def watched(browser: Browser, url: str) -> Iterator[Browser]:
    browser.open("about:blank")
    browser.console(), browser.requested()
    browser.open(f"{url}/")
    browser.wait_for("#served", " ")
    yield browser
    # Chromium itself tells of every answer that is an error of the API's.
    answers = (f"{url}/v1/encode", f"{url}/v1/models", f"{url}/v1/capacity")
    faults = [entry for entry in browser.console() if not entry["message"].startswith(answers)]
    assert faults == []
    assert browser.requested() == {urlsplit(url).netloc}


def choose(page: Browser, path: Path, panel: str = A) -> None:
    page.find(f"{panel} .file").send_keys(str(path))


def encoded(page: Browser, path: Path, panel: str = A) -> None:
    """Choose a file and wait for its tokens."""
    choose(page, path, panel)
    page.wait_for(f"{panel} .stages", "seen from here")
    page.wait_for("#nearest", panel_name(panel))


def panel_name(panel: str) -> str:
    return "A[" if panel == A else "B["


def answer_of(service: RunningService, path: Path, **options: Any) -> Embedding:
    with Client(service.url, trust_env=False) as client:
        return client.encode(path, **options)


def unit_rows(embedding: Embedding) -> Matrix:
    tokens = embedding.numpy().astype(np.float64)
    return (tokens / np.linalg.norm(tokens, axis=1, keepdims=True)).astype(np.float32)


def centre(token: int, embedding: Embedding) -> tuple[float, float]:
    """Of a token, in shares of the picture's width and height."""
    _, rows, columns = embedding.geometry.grid_thw
    return (token % (columns // 2) + 0.5) / (columns // 2), (token // (columns // 2) + 0.5) / (rows // 2)


def facts(page: Browser, panel: str = A) -> dict[str, str]:
    terms, descriptions = (page.find_all(f"{panel} .facts {tag}") for tag in ("dt", "dd"))
    return {term.text: description.text for term, description in zip(terms, descriptions, strict=True)}


def test_a_chosen_file_shows_what_the_api_tells_of_it(page: Browser, service: RunningService) -> None:
    encoded(page, SMALL)
    answer = service.encode(SMALL.read_bytes())
    shown = facts(page)
    assert shown["Picture"].startswith(f"150 × 110 px, {SMALL.stat().st_size:,} bytes")
    assert shown["Patches"] == "8 rows × 12 columns = 96 of 14 × 14 px"
    assert shown["Tier"] == "256 patches, 38% full (tiers: 64, 256, 1,024)"
    assert shown["Tokens"] == "24 of 128 numbers in bfloat16"
    assert shown["Memory of the answer"].startswith(f"{len(answer.content):,} bytes (")
    assert "24 × 128 × 2 B = 6,144," in shown["Memory of the answer"]
    assert shown["In a prompt"] == "<|media_begin|>image 150x110<|media_content|><|media_pad|><|media_end|>"
    assert shown["Request"] in {line["id"] for line in service.requests if line["route"] == "/v1/encode"}
    assert page.text(f"{A} .changes").splitlines() == [
        "Not resized: it is encoded at its own size.",
        "Padded with 18 px on the right and 2 px at the bottom to 168 × 112 px: a token covers 28 × 28 px.",
    ]
    stages = [entry.split(";")[0] for entry in answer.headers["server-timing"].split(", ")]
    assert [row.text.split(" ")[0] for row in page.find_all(f"{A} tbody tr")][: len(stages)] == stages
    assert f"Image A: 24 tokens of {SMALL.name}" == page.find(f"{A} .map").get_attribute("aria-label")


def test_the_heat_map_is_the_similarity_to_the_token_under_the_pointer(page: Browser, service: RunningService) -> None:
    encoded(page, SMALL)
    embedding = answer_of(service, SMALL)
    rows = unit_rows(embedding)
    for token in (0, 13, 23):
        page.point_at(f"{A} .map", *centre(token, embedding))
        page.wait_for("#reference", f"A[{token}],")
        similarities = rows @ rows[token]
        others = np.delete(similarities, token)
        low, high = float(page.text("#low")), float(page.text("#high"))
        assert (low, high) == pytest.approx((others.min(), others.max()), abs=ROUNDED)
        nearest = int(np.argmax(np.where(np.arange(len(rows)) == token, -2, similarities)))
        assert page.text("#nearest") == f"A[{nearest}] {similarities[nearest]:.4f}"
        shares = (similarities - others.min()) / (others.max() - others.min())
        assert colours_shown(page) == pytest.approx(np.array(colours_meant(page, shares)), abs=1)


def colours_shown(page: Browser) -> npt.NDArray[np.int64]:
    """[tokens, 3], off the heat-map's canvas."""
    return pixels_of(page, "heat").reshape(-1, 3)


def pixels_of(page: Browser, canvas: str) -> npt.NDArray[np.int64]:
    """[height, width, 3] of a canvas of the first panel."""
    *size, pixels = page.run(
        "const canvas = document.querySelector(given[0]);"
        "const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext('2d', { willReadFrequently: true });"
        "copy.drawImage(canvas, 0, 0);"
        "const { width, height, data } = copy.getImageData(0, 0, canvas.width, canvas.height);"
        "return [height, width, [...data]];",
        f"{A} canvas.{canvas}",
    )
    return np.array(pixels).reshape(*size, 4)[..., :3]


def colours_meant(page: Browser, shares: Matrix) -> list[list[int]]:
    return page.run(
        "const { colour } = await import(new URL('playground/colours.js', document.baseURI));"
        "return given[0].map(colour);",
        shares.tolist(),
    )  # type: ignore[no-any-return]


def test_arrow_keys_move_the_token_and_enter_holds_it(page: Browser, service: RunningService) -> None:
    encoded(page, SMALL)
    rows = unit_rows(answer_of(service, SMALL))  # 4 x 6 tokens
    page.run("document.querySelector(given[0]).focus()", f"{A} .map")
    page.press(Keys.ARROW_LEFT, Keys.ARROW_UP)  # the edge stays the edge
    page.wait_for("#reference", "A[0], row 1 of 4, column 1 of 6")
    page.press(Keys.ARROW_RIGHT, Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ARROW_LEFT, Keys.END)
    page.wait_for("#reference", "A[17], row 3 of 4, column 6 of 6")
    page.press(Keys.ENTER)
    page.wait_for("#reference-term", "Token held")
    page.press(Keys.HOME)
    for token in range(12, 18):
        shown = page.wait_for("#probe", f"A[{token}],")
        assert float(shown.split(": ")[1]) == pytest.approx(rows[17] @ rows[token], abs=ROUNDED)
        page.press(Keys.ARROW_RIGHT)
    assert page.text("#reference").startswith("A[17],")
    wait_until(lambda: "A[17]," in page.run("return document.querySelector('#announcer').textContent"))
    page.press(Keys.ESCAPE, Keys.ARROW_UP)
    page.wait_for("#reference", "A[11],")
    assert (page.text("#reference-term"), page.find("#probe-row").is_displayed()) == ("Token", False)


def test_two_pictures_are_compared(page: Browser, service: RunningService) -> None:
    page.drop("body", [SMALL, OTHER, LARGE])  # the third is left out
    for panel in (A, B):
        page.wait_for(f"{panel} .stages", "seen from here")
    page.wait_for("#nearest", "B[")
    a, b = (answer_of(service, path) for path in (SMALL, OTHER))
    page.point_at(f"{B} .map", *centre(5, b))
    page.wait_for("#reference", "B[5],")
    to_a = unit_rows(a) @ unit_rows(b)[5]
    assert page.text("#nearest").startswith(f"A[{to_a.argmax()}] {to_a.max():.4f}, B[")
    pooled = [answer_of(service, path, pooled=True, normalize=True).numpy() for path in (SMALL, OTHER)]
    assert float(page.text("#pooled")) == pytest.approx(pooled[0] @ pooled[1], abs=ROUNDED)
    page.find(f"{B} .map").click()  # holds a token of B, with which those of A are compared
    held = int(page.wait_for("#reference", "B[").split("]")[0][2:])
    page.point_at(f"{A} .map", *centre(7, a))
    shown = page.wait_for("#probe", "A[7],")
    assert float(shown.split(": ")[1]) == pytest.approx(unit_rows(a)[7] @ unit_rows(b)[held], abs=ROUNDED)
    page.screenshot("two")
    page.find(f"{B} .remove").click()
    wait_until(lambda: not page.find("#pooled-row").is_displayed())
    page.wait_for("#reference", "A[0],")


def test_a_picture_may_be_removed_while_it_is_compared(page: Browser) -> None:
    encoded(page, SMALL)
    page.run(
        f"""document.querySelector("{A} .map").dispatchEvent(new PointerEvent("pointermove", {{bubbles: true}}));
        document.querySelector("{A} .remove").click();
        document.querySelector("#announcer").textContent = "";
        await new Promise((resolve) => setTimeout(resolve, 600));"""
    )
    assert not page.find("#similarity").is_displayed()
    assert page.find("#announcer").get_attribute("textContent") == ""  # nothing of a token that is gone


def test_a_large_picture_is_refused_or_downscaled(page: Browser, service: RunningService) -> None:
    choose(page, LARGE)
    refused = service.encode(LARGE.read_bytes()).json()["error"]
    page.wait_for(f"{A} .error", refused["message"])
    shown = page.text(f"{A} .error")
    assert all(part in shown for part in ("422", "too_many_patches", "images[0]")), shown
    assert any(line["id"] in shown for line in service.requests if line.get("code") == "too_many_patches")
    assert page.find(f"{A} .pixels").is_displayed()
    assert "oversize" not in page.text("#curl")
    page.screenshot("refused")
    page.find("#policy [value=downscale]").click()
    page.wait_for(f"{A} .stages", "seen from here")
    assert page.text(f"{A} .error") == ""
    assert page.text(f"{A} .changes").splitlines() == [
        "Downscaled to 504 × 392 px, 56% of its sides: it has more patches than the top tier, 1,024, "
        "and the policy is to downscale.",
        "Not padded: both sides are multiples of a token's 28 px.",
    ]
    page.find("#policy [value=refuse]").click()
    page.wait_for(f"{A} .error", "too_many_patches")
    assert page.text(f"{A} .facts") == ""


def test_a_key_is_asked_for_used_and_kept_nowhere(guarded_page: Browser) -> None:
    page = guarded_page
    page.wait_for("#served", "needs an API key")
    choose(page, SMALL)
    page.wait_for(f"{A} .error", "unauthorized")
    page.find("#key").send_keys(KEY, Keys.ENTER)
    page.wait_for(f"{A} .stages", "seen from here")
    assert page.text("#served").startswith("tiny-k3-f32, float32, 128 numbers")
    kept = page.run("return JSON.stringify([{ ...localStorage }, { ...sessionStorage }, document.cookie])")
    assert kept == '[{},{},""]'
    assert KEY not in page.text("body")
    assert '-H "Authorization: Bearer $TPVISION_API_KEY"' in page.text("#curl")
    page.driver.refresh()
    page.wait_for("#served", "needs an API key")
    assert page.find("#key").get_property("value") == ""


def test_only_policies_that_are_allowed_can_be_chosen(guarded_page: Browser) -> None:
    guarded_page.find("#key").send_keys(KEY, Keys.ENTER)
    guarded_page.wait_for("#served", "tiny-k3-f32")
    options = {each.get_property("value"): each.is_enabled() for each in guarded_page.find_all("#policy option")}
    assert options == {"": True, "refuse": True, "downscale": False}
    assert guarded_page.text("#policy [value='']") == "refused (as the service is set)"


@pytest.mark.parametrize(
    ("name", "code"), [("image.svg", "unsupported_image"), ("doc.pdf", "unsupported_image"), ("jpeg_half.jpg", "")]
)
def test_a_bad_file_is_told_as_the_api_tells_it(page: Browser, service: RunningService, name: str, code: str) -> None:
    expected = service.encode((NASTY / name).read_bytes()).json()["error"]
    choose(page, NASTY / name)
    page.wait_for(f"{A} .error", expected["message"])
    assert (code or "undecodable_image") in page.text(f"{A} .error")
    page.find(f"{A} .remove").click()
    encoded(page, SMALL)


def test_a_file_called_json_is_sent_as_an_image(page: Browser, tmp_path: Path) -> None:
    (tmp_path / "images.json").write_bytes(SMALL.read_bytes())
    encoded(page, tmp_path / "images.json")


def test_a_picture_that_the_browser_cannot_draw_has_its_grid(page: Browser) -> None:
    encoded(page, NASTY / "multipage.tif")
    assert page.text(f"{A} figcaption").startswith("This browser cannot draw the file")
    assert page.find(f"{A} .lines").is_displayed()


def test_the_picture_is_turned_as_the_service_turns_it(page: Browser) -> None:
    encoded(page, TURNED)
    with Image.open(TURNED) as image:
        upright = np.asarray(ImageOps.exif_transpose(image).convert("RGB"), np.int64)
    drawn = pixels_of(page, "pixels")[: upright.shape[0], : upright.shape[1]]
    assert np.abs(drawn - upright).mean() < 3  # another decoder


def test_a_picture_that_the_service_does_not_turn_is_not_drawn_turned(guarded_page: Browser) -> None:
    guarded_page.find("#key").send_keys(KEY, Keys.ENTER)
    encoded(guarded_page, TURNED)
    assert facts(guarded_page)["Picture"].startswith("90 × 50 px")
    assert "cannot draw" in guarded_page.text(f"{A} figcaption")
    assert "does not turn pictures" in guarded_page.text(f"{A} figcaption")
    assert not pixels_of(guarded_page, "pixels").any()


def test_a_pasted_picture_is_encoded(page: Browser, service: RunningService) -> None:
    page.command("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    page.run(
        "const canvas = Object.assign(document.createElement('canvas'), { width: 60, height: 30 });"
        "canvas.getContext('2d').fillRect(0, 0, 30, 30);"
        "const png = await new Promise((resolve) => canvas.toBlob(resolve));"
        "await navigator.clipboard.write([new ClipboardItem({ 'image/png': png })]);"
    )
    page.find("body").send_keys(Keys.CONTROL, "v")
    page.wait_for(f"{A} .stages", "seen from here")
    assert facts(page)["Picture"].startswith("60 × 30 px")


def test_the_lines_to_copy_do_the_same(page: Browser, service: RunningService, tmp_path: Path) -> None:
    awkward = tmp_path / 'it\'s "a" photo.jpg'
    awkward.write_bytes(LARGE.read_bytes())
    page.find("#policy [value=downscale]").click()
    page.find(f"{A} .sample").click()
    page.wait_for(f"{A} .stages", "seen from here")
    encoded(page, awkward, B)
    pooled = float(page.wait_for("#pooled"))
    page.command("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    copied = []
    for button in page.find_all(".copy"):
        button.click()
        wait_until(lambda button=button: button.text == "Copied")  # type: ignore[misc]
        copied.append(page.run("return navigator.clipboard.readText()"))
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "NO_PROXY": "127.0.0.1"}
    commands = [["bash", "-ec", copied[0]], [sys.executable, "-c", copied[1]]]
    ended = [
        subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False, timeout=60)
        for command in commands
    ]
    assert [run.returncode for run in ended] == [0, 0], "".join(run.stderr for run in ended)
    same = service.encode(LARGE.read_bytes(), oversize="downscale").content
    assert (tmp_path / "tokens-b.safetensors").read_bytes()[-3000:] == same[-3000:]
    assert float(ended[1].stdout) == pytest.approx(pooled, abs=ROUNDED)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_dtype_is_read_exactly(page: Browser, service: RunningService, dtype: Any) -> None:
    values = page.run(
        "const { readHeader, readValues } = await import(new URL('playground/safetensors.js', document.baseURI));"
        "const [query, body] = [`dtype=${given[0]}`, Uint8Array.from(given[1])];"
        "const buffer = await (await fetch(`v1/encode?${query}`, { method: 'POST', body })).arrayBuffer();"
        "return [...readValues(buffer, readHeader(buffer))];",
        *(dtype, list(SMALL.read_bytes())),
    )
    expected = answer_of(service, SMALL, dtype=dtype).numpy().ravel()
    assert np.array_equal(np.array(values), expected.astype(np.float64))


def test_waiting_can_be_cancelled_and_tried_again(page: Browser, service: RunningService) -> None:
    (rank,) = ranks_of(service)
    os.kill(rank, signal.SIGSTOP)
    try:
        choose(page, SMALL)
        page.wait_for(f"{A} .progress", "Encoding")
        page.find(f"{A} .cancel").click()
        page.wait_for(f"{A} .error", "Cancelled")
    finally:
        os.kill(rank, signal.SIGCONT)
    page.find(f"{A} .error button").click()
    page.wait_for(f"{A} .stages", "seen from here")


def test_it_works_below_a_prefix(browser: Browser, service: RunningService, tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "nginx.conf").write_text(
        f"daemon off; pid {tmp_path}/pid; events {{}} http {{ access_log off; server {{ listen 127.0.0.1:{port};"
        f" location /vision/ {{ proxy_pass {service.url}/; }} }} }}"
    )
    command = [tool("nginx"), "-p", str(tmp_path), "-e", "stderr", "-c", "nginx.conf"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as nginx:
        try:
            url = f"http://127.0.0.1:{port}/vision"
            wait_until(lambda: subprocess.run(["curl", "-sf", f"{url}/livez"], check=False).returncode == 0)
            for page in watched(browser, url):
                encoded(page, SMALL)
                assert f"{url}/v1/encode" in page.text("#curl")
                assert f'Client("{url}")' in page.text("#python")
        finally:
            nginx.terminate()


@pytest.mark.parametrize(("width", "scheme"), [(320, "light"), (390, "dark"), (1280, "light"), (1280, "dark")])
def test_it_fits_the_screen(page: Browser, service: RunningService, width: int, scheme: str) -> None:
    page.open(f"{service.url}/", width=width, height=800, scheme=scheme)
    page.wait_for("#served", "bfloat16")
    page.screenshot(f"empty-{width}-{scheme}")
    page.find("#policy [value=downscale]").click()
    page.find(f"{A} .sample").click()
    page.wait_for(f"{A} .stages", "seen from here")
    choose(page, NASTY / "jpeg_half.jpg", B)
    page.wait_for(f"{B} .error", "undecodable_image")
    page.point_at(f"{A} .map", 0.3, 0.6)
    page.wait_for("#nearest", "A[")
    page.screenshot(f"{width}-{scheme}")
    assert page.run("return document.documentElement.scrollWidth") <= width


def test_everything_that_can_be_used_has_a_name_and_comes_in_order(page: Browser) -> None:
    encoded(page, SMALL)
    tree = page.command("Accessibility.getFullAXTree")["nodes"]
    used = [node for node in tree if node["role"]["value"] in ("button", "textbox", "combobox", "slider", "checkbox")]
    assert len(used) >= 8
    assert [node for node in used if not node["name"]["value"].strip()] == []
    page.run("document.activeElement.blur()")
    order = []
    for _ in range(9):
        page.press(Keys.TAB)
        order.append(
            page.run("const { id, className, tagName } = document.activeElement; return id || className || tagName")
        )
    assert order == ["A", "A", "A", "policy", "key", "strength", "grid", "file", "remove"]
    page.press(Keys.ENTER)
    assert page.driver.switch_to.active_element.text == "Image A"  # and not lost with the button
