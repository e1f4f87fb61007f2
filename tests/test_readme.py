"""The README's promises that a machine can check: the settings table, and every curl line.

`python tests/test_readme.py` writes the settings table into the README.
"""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from make_photograph import PHOTOGRAPH
from running import ROOT, RunningService

from service.demo_model import write_demo_model
from tp.settings import Settings, known_names

README = ROOT / "README.md"
START, END = "<!-- settings: checked by tests/test_readme.py -->\n", "<!-- end of settings -->"
CURL_LINES = [
    line for line in README.read_text().splitlines() if re.match(r"(curl|printf) .*http://127.0.0.1:8000", line)
]


def settings_table() -> str:
    defaults = Settings().model_dump(mode="json")
    lines = ["| setting | default | what |", "|---|---|---|"]
    for name, field in known_names():
        section, key = name.split(".")
        default = defaults[section][key]
        shown = ",".join(map(str, default)) if isinstance(default, list) else default
        lines.append(f"| `{name}` | {'' if shown in (None, '') else f'`{shown}`'} | {field.description} |")
    return "\n".join(lines) + "\n"


def test_the_settings_table_is_the_codes() -> None:
    text = README.read_text()
    assert text[text.index(START) + len(START) : text.index(END)] == settings_table()


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


if __name__ == "__main__":
    text = README.read_text()
    README.write_text(text[: text.index(START) + len(START)] + settings_table() + text[text.index(END) :])
