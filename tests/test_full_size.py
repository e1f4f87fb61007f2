"""K3's true shape in bfloat16 on two ranks: minutes and gigabytes, so on demand (`pytest -m slow`)."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from make_photograph import acceptance_picture
from running import ROOT, RunningService, ranks_of
from safetensors.torch import load

from service.demo_model import write_demo_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

SPARE_BYTES = 700_000_000  # interpreter, torch and allocator, beside what `tpvision plan` counts


@pytest.fixture(scope="module")
def full_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "full"
    write_demo_model(folder, size="full")
    return folder


def planned_bytes(model: Path) -> int:
    command = [sys.executable, "-m", "service", "plan", "--model", str(model), "--tp", "2", "--json"]
    plan = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout)
    rank = plan["per_rank"]
    return int(rank["weights_bytes"] + rank["scratch_bytes"] + plan["slab"]["total_bytes"])


def resident_bytes_of_ranks(service: RunningService) -> list[int]:
    sizes = []
    for pid in ranks_of(service):
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        sizes.append(sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem")))
    return sizes


def test_each_rank_stays_within_its_plan(start_service: Any, full_model: Path) -> None:
    service: RunningService = start_service("--model", str(full_model), "--tp", "2")
    limit = planned_bytes(full_model) + SPARE_BYTES
    at_start = resident_bytes_of_ranks(service)
    picture = acceptance_picture(448, 448)
    for _ in range(20):
        assert load(service.encode(picture).content)["embeddings"].shape == (256, 7168)
    after = resident_bytes_of_ranks(service)
    print(f"\nresident at start {at_start}, after 20 requests {after}, limit {limit}")
    assert len(at_start) == len(after) == 2
    assert max(*at_start, *after) < limit
