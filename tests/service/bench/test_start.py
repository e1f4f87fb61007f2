"""`tpvision bench start` on the tiny demo model: starts, loses a rank, and starts again."""

import json
import subprocess

import pytest
from running import COMMAND, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_starts_are_held_against_the_least_they_could_take() -> None:
    command = [*COMMAND, "bench", "start", "--demo", "tiny", "--device", "cpu", "--rounds", "1", "--json"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580, check=False)
    assert ended.returncode == 0, ended.stderr
    bare, reading, forward, start, again = json.loads(ended.stdout)["rows"]
    least_s = bare["value"] + 2 * reading["value"] + forward["value"]
    for row in (start, again):
        assert row["reference"] == pytest.approx(least_s)
        assert row["ratio"] == pytest.approx(row["value"] / least_s)
        assert row["is_met"] == (row["ratio"] <= 1.3)
    assert start["value"] > forward["value"] > 0
