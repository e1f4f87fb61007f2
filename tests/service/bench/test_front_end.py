"""`tpvision bench front-end` runs to its end; what its figures are is for a quiet machine to say."""

import json
import subprocess

import pytest
from running import COMMAND, ROOT

from service.bench.front_end import after_rows_s
from service.bench.load import Outcome
from service.record import STAGES


def test_what_follows_the_rows_is_all_but_the_stages_before_them() -> None:
    stages_s = {stage: float(2**index) for index, stage in enumerate(STAGES)}
    outcome = Outcome(due_s=0, sent_s=0, latency_s=5000, status=200, picture=0, bytes_in=1, stages_s=stages_s)
    before = ("receive", "header", "decode", "preprocess", "queue", "forward", "all_gather", "coalesce")
    assert after_rows_s(outcome) == 5000 - sum(stages_s[stage] for stage in before)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_figure_is_there() -> None:
    command = [*COMMAND, "bench", "front-end", "--seconds", "0.3", "--json"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580, check=False)
    assert ended.returncode == 0, ended.stderr
    rows = {row["what"]: row for row in json.loads(ended.stdout)["rows"]}
    assert {(row["target"], row["target_is"], row["unit"]) for row in rows.values() if row["target"]} == {
        (1.25, "at most", "ms"),
        (1.8, "at least", "images/s"),
        (1.5, "at most", "ms"),
        (1.5, "at most", "MB"),
        (1, "at least", "requests"),
        (3, "at most", "ms"),
    }
    decoding = [row for what, row in rows.items() if what.startswith("CPU from body to rows")]
    assert [row["details"]["patches"] for row in decoding] == [3300, 16_280, 61_776]
    large = rows["rows to last byte, 58.7 MB of octet-stream"]
    assert large["reference"] > 0 and large["details"]["copy_to_touched_memory_ms"] > 0
    assert rows["58.7 MB from a server that only sends"]["reference"] > 0
    assert rows["front-end memory for it, safetensors"]["value"] > 50  # the one copy
    for row in rows.values():
        assert row["value"] > 0
        assert row["details"].get("statuses", {"200": 1}).keys() == {"200"}, row
