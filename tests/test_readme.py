"""The README's promises that a machine can check: its tables of settings and metrics, curl lines and Python.

`python tests/test_readme.py` writes the tables into the README.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from make_photograph import PHOTOGRAPH, acceptance_picture
from running import ROOT, RunningService
from tables import split_at_table, write_tables

from service.demo_model import write_demo_model
from service.metrics import Metrics
from tp.settings import RELOADABLE, Settings, known_names

README = ROOT / "README.md"
CURL_LINES = [
    line for line in README.read_text().splitlines() if re.match(r"(curl|printf) .*http://127.0.0.1:8000", line)
]


def settings_table() -> str:
    defaults = Settings().model_dump(mode="json")
    lines = ["| setting | default | what | reload |", "|---|---|---|---|"]
    for name, field in known_names():
        section, key = name.split(".")
        default = defaults[section][key]
        shown = ",".join(map(str, default)) if isinstance(default, list) else default
        choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
        what = field.description + (f" One of {', '.join(f'`{choice}`' for choice in choices)}." if choices[1:] else "")
        value = "" if shown in (None, "") else f"`{shown}`"
        lines.append(f"| `{name}` | {value} | {what} | {RELOADABLE.get(name, '')} |")
    return "\n".join(lines) + "\n"


def metrics_table() -> str:
    metrics = Metrics(Settings(), model="", dtype="", read_state=lambda: pytest.fail("nobody looks"))
    lines = ["| metric | kind | labels | what |", "|---|---|---|---|"]
    for each in metrics.catalogue:
        labels = ", ".join(f"`{label}`" for label in each.labels)
        lines.append(f"| `{each.name}` | {each.kind} | {labels} | {each.help} |")
    return "\n".join(lines) + "\n"


TABLES: dict[str, Callable[[], str]] = {"settings": settings_table, "metrics": metrics_table}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_the_codes(name: str) -> None:
    assert split_at_table(README.read_text(), name)[1] == TABLES[name]()


@pytest.fixture(scope="module")
def demo_service(start_service: Any, tmp_path_factory: pytest.TempPathFactory) -> RunningService:
    folder = tmp_path_factory.mktemp("models") / "demo"
    write_demo_model(folder, size="tiny")
    service: RunningService = start_service("--model", str(folder), "--tp", "2")
    return service


@pytest.mark.parametrize("line", CURL_LINES, ids=range(len(CURL_LINES)))
def test_a_curl_line_runs_as_it_stands(demo_service: RunningService, line: str, tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(PHOTOGRAPH.read_bytes())
    command = line.replace("http://127.0.0.1:8000", demo_service.url)
    ended = subprocess.run(["bash", "-ec", command], cwd=tmp_path, capture_output=True, check=False, timeout=120)
    assert ended.returncode == 0, ended.stderr + ended.stdout
    answer = ended.stdout + b"".join(path.read_bytes() for path in tmp_path.glob("tokens.*"))
    assert answer


def test_there_are_curl_lines() -> None:
    assert len(CURL_LINES) >= 8


def test_the_embed_line_and_the_python_run_as_they_stand(demo_service: RunningService, tmp_path: Path) -> None:
    text = README.read_text().replace("http://127.0.0.1:8000", demo_service.url)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photo.jpg").write_bytes(PHOTOGRAPH.read_bytes())
    for name, width in (("a", 448), ("b", 448), ("c", 56)):
        (tmp_path / "photos" / f"{name}.jpg").write_bytes(acceptance_picture(width, 448))
    (line,) = re.findall(rf"^tpvision (embed .*{demo_service.url})$", text, re.MULTILINE)
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    commands = [["-m", "service", *line.split()], *(["-c", block] for block in blocks)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "NO_PROXY": "127.0.0.1"}
    ended = [
        subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        for command in commands
    ]
    assert [run.returncode for run in ended] == [0, 0, 0], "".join(run.stderr for run in ended)
    assert ended[1].stdout.splitlines() == ["(1610, 128) torch.float32 (1, 70, 92)", "(128,)", "(128,)"]
    assert [row.split()[1] for row in ended[2].stdout.splitlines()][2] == "photos/c.jpg"  # a and b are the same
    assert ended[2].stdout.startswith("1.0000")


if __name__ == "__main__":
    write_tables(README, TABLES)
