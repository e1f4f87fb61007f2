"""Lint, format and strict types are part of the test command, so that one command checks everything."""

import subprocess
import sys

import pytest
from running import ROOT


@pytest.mark.parametrize(
    "arguments",
    [("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",)],
    ids=["lint", "format", "types"],
)
def test_the_code_is_clean(arguments: tuple[str, ...]) -> None:
    ended = subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
