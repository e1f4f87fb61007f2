"""Debian's headless Chromium, driven by Selenium, for tests of the playground. Skips where it is not installed.

Screenshots lie in .screenshots/, for people to look at.
"""

import base64
import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from running import ROOT
from selenium.common.exceptions import StaleElementReferenceException, TimeoutException
from selenium.webdriver import ActionChains, Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait
from tools import tool

SCREENSHOTS = ROOT / ".screenshots"
WAIT_S = 30
_POLL_S = 0.05
_PAGES = ("http", "https", "ws", "wss", "ftp", "file")  # schemes by which something could leave the page's host
_FLAGS = (
    "--headless=new",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--force-color-profile=srgb",
    "--no-first-run",
    "--proxy-server=direct://",
)


class Browser:
    """One Chromium. `open` loads a page anew; nothing is kept between pages."""

    def __init__(self) -> None:
        options = ChromeOptions()
        options.binary_location = tool("chromium")
        for flag in (*_FLAGS, *(["--no-sandbox"] if os.geteuid() == 0 else [])):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = Chrome(options=options, service=ChromeService(tool("chromedriver")))

    def open(self, url: str, *, width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        """Load a page in a window of that many CSS pixels; `scheme` is what the user prefers, light or dark."""
        self.resize(width, height)
        self.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.driver.get(url)

    def resize(self, width: int, height: int) -> None:
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def close(self) -> None:
        self.driver.quit()

    def command(self, name: str, **arguments: Any) -> Any:
        """A command of the DevTools protocol."""
        return self.driver.execute_cdp_cmd(name, arguments)

    def run(self, script: str, *arguments: Any) -> Any:
        """The result of an async function's body in the page, with `arguments`."""
        return self.driver.execute_script(f"return (async (...given) => {{ {script} }})(...arguments)", *arguments)

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def find_all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        return self.find(selector).text

    def wait_for(self, selector: str, text: str = "") -> str:
        """Until an element that matches is seen and has this text among its own; that text."""

        def found(_: Chrome) -> str | None:
            texts = [element.text for element in self.find_all(selector) if element.is_displayed()]
            return next((shown or " " for shown in texts if text in shown), None)

        waiting = WebDriverWait(self.driver, WAIT_S, _POLL_S, ignored_exceptions=[StaleElementReferenceException])
        try:
            return waiting.until(found)
        except TimeoutException:
            pytest.fail(f"{selector} did not show {text!r}; there is:\n{self.text('body')}")

    def point_at(self, selector: str, x: float, y: float) -> None:
        """Move the pointer to a place of an element, given in shares of its width and height."""
        element = self.find(selector)
        offsets = (round((x - 0.5) * element.size["width"]), round((y - 0.5) * element.size["height"]))
        ActionChains(self.driver, duration=0).move_to_element_with_offset(element, *offsets).perform()

    def press(self, *keys: str) -> None:
        """Type into whatever has the focus."""
        ActionChains(self.driver, duration=0).send_keys(*keys).perform()

    def drop(self, selector: str, paths: Sequence[Path]) -> None:
        """Drag files from outside onto an element, as a user does."""
        area = self.find(selector).rect
        place = {"x": area["x"] + area["width"] / 2, "y": area["y"] + area["height"] / 2}
        data = {"items": [], "files": [str(path) for path in paths], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            self.command("Input.dispatchDragEvent", type=kind, data=data, **place)

    def screenshot(self, name: str) -> None:
        """The whole page, however long, in .screenshots/."""
        SCREENSHOTS.mkdir(exist_ok=True)
        size = self.command("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        taken = self.command("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        (SCREENSHOTS / f"{name}.png").write_bytes(base64.b64decode(taken["data"]))

    def console(self) -> list[dict[str, Any]]:
        """Warnings and errors on the console since the last call."""
        return [entry for entry in self.driver.get_log("browser") if entry["level"] in ("WARNING", "SEVERE")]

    def requested(self) -> set[str]:
        """Hosts, with their ports, of which anything was asked since the last call."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        urls = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
        return {urlsplit(url).netloc for url in urls if urlsplit(url).scheme in _PAGES}


@contextlib.contextmanager
def running_browser() -> Iterator[Browser]:
    """A browser that ends with the block."""
    browser = Browser()
    try:
        yield browser
    finally:
        browser.close()
