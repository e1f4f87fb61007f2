"""Hostile files over HTTP: an answer or a 4xx, never a 5xx, a hang or a lost worker; the next picture is as before."""

import asyncio
import io
import json
import random
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import httpx
import load as load_generator
import numpy as np
import pytest
import torch
from PIL import Image
from running import DATA, GOLDEN, RunningService, assert_balanced, descendants, images_of, ranks_of, resident_bytes
from safetensors.torch import load

pytestmark = [pytest.mark.faults, pytest.mark.timeout(400)]

NASTY = DATA / "nasty"
ENTRIES = json.loads((NASTY / "manifest.json").read_text())["files"]
REFERENCE = (NASTY / "ref_quad.png").read_bytes()
NUM_MUTATIONS = 3000
PILLOW = "13.0.0"


@pytest.fixture(scope="module")
def service(start_service: Callable[..., RunningService]) -> RunningService:
    arguments = ["--model", str(GOLDEN / "tiny-k3-f32"), "--tp", "2", "--policy", "downscale"]
    return start_service(*arguments, "--capacities", "256,1024,4096")


@pytest.fixture(scope="module")
def pooled(service: RunningService) -> Callable[[str], torch.Tensor]:
    """The mean token of a file of the folder."""

    def embed(name: str) -> torch.Tensor:
        answer = service.encode((NASTY / name).read_bytes(), output="pooled")
        assert answer.status_code == 200, (name, answer.text)
        return load(answer.content)["embeddings"][0]

    return embed


@pytest.mark.parametrize("entry", ENTRIES, ids=[entry["file"] for entry in ENTRIES])
def test_a_nasty_file_has_the_outcome_of_the_manifest(
    service: RunningService, pooled: Callable[[str], torch.Tensor], entry: dict[str, Any]
) -> None:
    answer = service.encode((NASTY / entry["file"]).read_bytes())
    if answer.status_code != 200:
        assert 400 <= answer.status_code < 500, answer.text
        assert "client_error" in entry["accept"], answer.text
        assert len(answer.content) < 600
        return
    (image,) = images_of(answer)
    assert ("ok_downscaled" if image["downscaled"] else "ok") in entry["accept"]
    assert image["original_size"] == entry.get("size", image["original_size"])
    assert torch.isfinite(load(answer.content)["embeddings"]).all()
    if "same_as" in entry:
        cosine = torch.cosine_similarity(pooled(entry["file"]), pooled(entry["same_as"]), dim=0)
        assert cosine >= entry["min_cos"]


def post_all(service: RunningService, files: Sequence[bytes]) -> list[load_generator.Outcome]:
    """Every file, eight at a time; after every fifty and at the end the reference picture is encoded as at first."""

    async def run() -> list[load_generator.Outcome]:
        outcomes = []
        async with httpx.AsyncClient(base_url=service.url, timeout=60, trust_env=False) as client:
            first = load((await client.post("/v1/encode", content=REFERENCE)).content)["embeddings"]
            for start in range(0, len(files), 50):
                gate = asyncio.Semaphore(8)

                async def one(content: bytes, gate: asyncio.Semaphore = gate) -> load_generator.Outcome:
                    async with gate:
                        return await load_generator.send(client, content)

                outcomes += await asyncio.gather(*(one(content) for content in files[start : start + 50]))
                answer = await client.post("/v1/encode", content=REFERENCE)
                torch.testing.assert_close(load(answer.content)["embeddings"], first, rtol=0, atol=1e-5)
        return outcomes

    ranks = ranks_of(service)
    outcomes = asyncio.run(run())
    statuses = {status: sum(o.status == status for o in outcomes) for status in sorted({o.status for o in outcomes})}
    print(f"\n{len(files)} files: {statuses}, slowest {max(outcome.latency_s for outcome in outcomes):.1f} s")
    assert all(outcome.status == 200 or 400 <= outcome.status < 500 for outcome in outcomes), statuses
    assert ranks_of(service) == ranks
    assert_balanced(service)
    return outcomes


def mutations(count: int) -> Iterable[bytes]:
    """Valid files with some bytes changed, cut off, repeated or swapped; the same ones every time."""
    generator = random.Random(20261130)
    valid = [
        (NASTY / entry["file"]).read_bytes()
        for entry in ENTRIES
        if entry["expected"] == "ok" and 0 < entry["bytes"] < 20_000
    ]
    for _ in range(count):
        data = bytearray(generator.choice(valid))
        for _ in range(generator.choice([1, 1, 2, 8, 64])):
            position = generator.randrange(len(data))
            match generator.randrange(4):
                case 0:
                    data[position] = generator.randrange(256)
                case 1:
                    data[position : position + 4] = generator.choice(
                        [b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff"]
                    )
                case 2:
                    del data[position : position + generator.randrange(1, 16)]
                case _:
                    data[position:position] = data[position : position + generator.randrange(1, 64)]
            if not data:
                break
        yield bytes(data)


def test_three_thousand_mutations(service: RunningService) -> None:
    post_all(service, list(mutations(NUM_MUTATIONS)))


def test_pillows_own_odd_images(service: RunningService, tmp_path: Path) -> None:
    arguments = ["download", "--no-deps", "--no-binary", ":all:", f"pillow=={PILLOW}"]
    command = [sys.executable, "-m", "pip", "--quiet", *arguments, "-d", str(tmp_path)]
    fetched = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    archives = list(tmp_path.glob("*.tar.gz"))
    if not archives:
        pytest.skip(f"pip cannot fetch Pillow's source distribution: {fetched.stderr[-200:]}")
    with tarfile.open(archives[0]) as archive:
        members = [member for member in archive.getmembers() if "/Tests/images/" in member.name and member.isfile()]
        files = [extracted.read() for member in members if (extracted := archive.extractfile(member))]
    outcomes = post_all(service, [content for content in files if content])
    assert sum(outcome.status == 200 for outcome in outcomes) > 200


def test_header_bombs_cost_no_memory(service: RunningService) -> None:
    def resident() -> int:
        return sum(map(resident_bytes, [service.process.pid, *descendants(service.process.pid)]))

    bombs = [(NASTY / entry["file"]).read_bytes() for entry in ENTRIES if entry.get("header_px", 0) > 100_000_000]
    for bomb in bombs:
        service.encode(bomb)
    before = resident()
    for bomb in bombs:
        answer = service.encode(bomb)
        assert 400 <= answer.status_code < 500
    print(f"\n{len(bombs)} header bombs: {resident() - before} bytes")
    assert resident() - before < 5_000_000


def test_a_picture_that_decodes_for_too_long_is_ended(start_service: Callable[..., RunningService]) -> None:
    service = start_service(
        "--model", str(GOLDEN / "tiny-k3-f32"), "--policy", "downscale", TPVISION_LIMITS__DECODE_TIMEOUT_S="0.5"
    )
    noise = np.random.default_rng(0).integers(0, 256, (5000, 5000, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, "JPEG", quality=95, progressive=True)
    for _ in range(3):
        answer = service.encode(buffer.getvalue())
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, "decode_timeout")
    assert service.encode(REFERENCE).status_code == 200
    assert_balanced(service)
