"""The three looks of a log line: JSON, text, and text on a terminal."""

import json
import os
import pty
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest
from running import ROOT

PROGRAM = """
import logging
from service.logs import start_logging
from service.record import RequestRecord
from service.reporter import log
from tp.settings import ServerSettings, Settings

start_logging(Settings(server=ServerSettings(log_format="{form}", log_level="{level}")))
logging.getLogger("tpvision.test").info("two\\nlines of %d", 7)
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("tpvision.test").exception("a fault")
log.info("request", **RequestRecord("the-id", method="GET", route="/v1/models", status=200, ended=1e9).fields())
"""


def written(form: str, level: str = "info", *, terminal: bool = False) -> str:
    """What a process writes to its stderr, a pipe or a terminal."""
    ours, theirs = pty.openpty() if terminal else os.pipe()
    command = [sys.executable, "-c", PROGRAM.format(form=form, level=level)]
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "200"}
    subprocess.run(command, cwd=ROOT, env=environ, stderr=theirs, check=True, timeout=60)
    os.set_blocking(ours, False)  # a terminal has no end
    text = os.read(ours, 2**16).decode()
    os.close(ours)
    os.close(theirs)
    return text


@pytest.mark.parametrize(("form", "terminal"), [("auto", False), ("json", False), ("json", True)])
def test_json_is_one_object_a_line(form: str, terminal: bool) -> None:
    first, second, third = map(json.loads, written(form, terminal=terminal).splitlines())
    assert (first["event"], first["level"], first["logger"]) == ("two\nlines of 7", "info", "tpvision.test")
    assert timedelta(0) < datetime.now(UTC) - datetime.fromisoformat(first["timestamp"]) < timedelta(minutes=1)
    assert (second["event"], second["level"]) == ("a fault", "error")
    assert second["exception"].startswith("Traceback") and "ZeroDivisionError" in second["exception"]
    assert (third["event"], third["id"], third["logger"]) == ("request", "the-id", "tpvision.http")


def test_console_is_text() -> None:
    text = written("console")
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO tpvision.test two\nlines of 7\n", text)
    assert " ERROR tpvision.test a fault\nTraceback (most recent call last):\n" in text
    assert re.search(r" INFO tpvision.http request +id=the-id method=GET route=/v1/models status=200 ", text)


@pytest.mark.parametrize("form", ["auto", "console"])
def test_a_terminal_gets_text(form: str) -> None:
    text = re.sub(r"\x1b\[[0-9;]*m", "", written(form, terminal=True))
    assert re.search(r"INFO +two\s+lines of 7", text)
    assert re.search(r"request +id=the-id method=GET", text)
    assert "ZeroDivisionError" in text


def test_a_level_leaves_lines_out() -> None:
    assert [json.loads(line)["event"] for line in written("json", "warning").splitlines()] == ["a fault"]
