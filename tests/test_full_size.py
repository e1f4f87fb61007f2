"""K3's true shape in bfloat16 on two ranks: minutes and gigabytes, so on demand (`pytest -m slow`)."""

import json
import random
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

SIDES = {56: 8, 112: 6, 252: 4, 448: 2, 672: 1}  # pixels of square pictures, and how often each comes
SPARE_BYTES = 700_000_000  # interpreter, torch and allocator, beside what `tpvision plan` counts
FLAT_BYTES = 32_000_000  # one activation of the largest of those pictures takes 5 MB


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


def resident_bytes_of_ranks(service: RunningService, *kinds: str) -> list[int]:
    sizes = []
    for pid in ranks_of(service):
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        sizes.append(sum(int(fields[kind].split()[0]) * 1024 for kind in kinds))
    return sizes


def test_each_rank_stays_within_its_plan(start_service: Any, full_model: Path) -> None:
    service: RunningService = start_service("--model", str(full_model), "--tp", "2")
    limit = planned_bytes(full_model) + SPARE_BYTES
    at_start = resident_bytes_of_ranks(service, "RssAnon", "RssShmem")
    picture = acceptance_picture(448, 448)
    for _ in range(20):
        assert load(service.encode(picture).content)["embeddings"].shape == (256, 7168)
    after = resident_bytes_of_ranks(service, "RssAnon", "RssShmem")
    print(f"\nresident at start {at_start}, after 20 requests {after}, limit {limit}")
    assert len(at_start) == len(after) == 2
    assert max(*at_start, *after) < limit


def test_memory_of_ranks_is_flat_over_200_mixed_requests(start_service: Any, full_model: Path) -> None:
    service: RunningService = start_service("--model", str(full_model), "--tp", "2")
    pictures = {side: acceptance_picture(side, side) for side in SIDES}
    for picture in pictures.values():
        service.encode(picture)
    sides = random.Random(0).choices(list(SIDES), list(SIDES.values()), k=200)
    grown = []
    before = resident_bytes_of_ranks(service, "RssAnon")  # the slab is shared, and was allocated whole
    for number, side in enumerate(sides, 1):
        assert service.encode(pictures[side]).status_code == 200
        if number % 40 == 0:
            now = resident_bytes_of_ranks(service, "RssAnon")
            grown.append([after - first for after, first in zip(now, before, strict=True)])
    print(f"\ngrowth of each rank after every 40 requests, in bytes: {grown}")
    assert max(grown[-1]) < FLAT_BYTES
