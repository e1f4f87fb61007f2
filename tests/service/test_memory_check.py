"""Tiers that do not fit the memory are refused before anything is started, and those that fit are not."""

import contextlib
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_machine import Machine
from running import COMMAND, GOLDEN, ROOT, RunningService, descendants

from service import host_memory
from service.memory_check import _DECODE_PROCESS_BYTES, _TORCH_PROCESS_BYTES, check_host, host_rows
from tp.memory import MemoryShortError, scratch_rows, total_bytes, weight_rows
from tp.settings import Settings, load_settings
from tp.slab import SlabLayout
from tp.spec import PUBLISHED_K3

MODEL = GOLDEN / "tiny-k3-f32"
GOOD = (GOLDEN / "images" / "rgb_64x48.png").read_bytes()
MIB = 2**20


def settings(**flags: object) -> Settings:
    return load_settings(flags={name.replace("__", "."): value for name, value in flags.items()}).settings


def needed(of: Settings, **options: object) -> dict[str, int]:
    top = of.capacity.max_patches_per_image
    rows = host_rows(PUBLISHED_K3, of, **{"top": top, "num_cores": 1, "on_cpu": True, **options})  # type: ignore[arg-type]
    return {row.name.split(" of ")[0]: row.num_bytes for row in rows}


def test_each_thing_is_counted_once() -> None:
    made = settings(parallel__tensor=3, parallel__groups=2, parallel__threads=1)
    rows = needed(made)
    slab = SlabLayout.of(PUBLISHED_K3, num_patches=4 * 16_384 * 2, itemsize=2)
    shape = {"world_size": 3, "dtype": "bfloat16"}
    weights = sum(total_bytes(weight_rows(PUBLISHED_K3, **shape, rank=rank)) for rank in range(3))
    scratch = sum(total_bytes(scratch_rows(PUBLISHED_K3, num_patches=16_384, **shape, rank=rank)) for rank in range(3))
    assert rows == {
        "slab": slab.total_bytes,
        "decode processes": 2 * _DECODE_PROCESS_BYTES,
        "ranks and their launchers": 2 * 4 * _TORCH_PROCESS_BYTES,
        "weights": 2 * weights,
        "scratch": 2 * scratch,
    }


def test_a_second_group_needs_no_second_slab_where_its_size_is_set() -> None:
    one, two = (needed(settings(capacity__slab_patches=65_536, parallel__groups=groups)) for groups in (1, 2))
    assert one["slab"] == two["slab"]
    assert two["weights"] == 2 * one["weights"]


def test_ranks_on_gpus_take_no_weights_or_scratch_of_the_machine() -> None:
    assert needed(settings(), on_cpu=False).keys() == {"slab", "decode processes", "ranks and their launchers"}


def test_the_content_cache_is_counted_full() -> None:
    without, full = needed(settings()), needed(settings(cache__max_bytes=3 * 2**30))
    assert full == without | {"content cache": 3 * 2**30}


def test_each_side_counts_what_it_starts() -> None:
    both = settings(parallel__tensor=2, parallel__groups=3, cache__max_bytes=1)
    front_end, workers = needed(both, side="front-end"), needed(both, side="workers")
    assert front_end.keys() == {"slab", "decode processes", "content cache"}
    one_group = needed(replace_groups(both, 1))
    assert workers == {name: one_group[name] for name in ("ranks and their launchers", "weights", "scratch")}


def replace_groups(of: Settings, groups: int) -> Settings:
    return of.model_copy(update={"parallel": of.parallel.model_copy(update={"groups": groups})})


@pytest.mark.parametrize("version", [1, 2])
def test_the_refusal_names_what_is_needed_there_and_missing_and_the_largest_tier_that_fits(
    tmp_path: Path, version: int
) -> None:
    machine = Machine(tmp_path)
    machine.mount(version=version, own="/box")
    box = "memory/box" if version == 1 else "box"
    made = settings(parallel__tensor=2, parallel__device="cpu")
    machine.limit(box, 3000 * MIB, used=600 * MIB, file_pages=200 * MIB)
    check_host(PUBLISHED_K3, made, root=tmp_path)
    machine.limit(box, 2000 * MIB, used=600 * MIB, file_pages=200 * MIB)
    with pytest.raises(MemoryShortError) as caught:
        check_host(PUBLISHED_K3, made, root=tmp_path)
    text = str(caught.value)
    num_cores = len(os.sched_getaffinity(0))
    expected = sum(needed(made, num_cores=num_cores).values())
    assert f"{expected:,} bytes are needed" in text
    assert f"{1600 * MIB:,} are there, {expected - 1600 * MIB:,} are missing" in text
    assert "slab " in text and "weights " in text and "scratch of 16,384 patches " in text
    found = re.search(r"tier that would fit: ([\d,]+) patches", text)
    assert found
    told = int(found[1].replace(",", ""))
    for tier, fits in ((told, True), (told + 4, False)):
        lower = settings(parallel__tensor=2, parallel__device="cpu", capacity__patch_capacities=[tier])
        with contextlib.nullcontext() if fits else pytest.raises(MemoryShortError):
            check_host(PUBLISHED_K3, lower, root=tmp_path)


def test_where_no_tier_fits_it_says_so(tmp_path: Path) -> None:
    Machine(tmp_path, available_bytes=100 * MIB)
    with pytest.raises(MemoryShortError, match="tier that would fit: none"):
        check_host(PUBLISHED_K3, settings(), root=tmp_path)


def test_a_slab_of_a_set_size_is_named_where_it_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(MemoryShortError, match=r"with capacity\.slab_patches 40,000,000, "):
        check_host(PUBLISHED_K3, settings(capacity__slab_patches=40_000_000), root=Machine(tmp_path).root)


def test_what_is_just_there_is_enough(tmp_path: Path) -> None:
    made = settings(parallel__device="cpu", capacity__patch_capacities=[64])
    total = sum(needed(made, num_cores=len(os.sched_getaffinity(0))).values())
    Machine(tmp_path, available_bytes=-(-total // 1024) * 1024)
    check_host(PUBLISHED_K3, made, root=tmp_path)
    Machine(tmp_path, available_bytes=total // 1024 * 1024 - 1024)
    with pytest.raises(MemoryShortError):
        check_host(PUBLISHED_K3, made, root=tmp_path)


def test_memory_that_is_promised_to_others_but_not_taken_counts_as_there(tmp_path: Path) -> None:
    machine = Machine(tmp_path, available_bytes=4000 * MIB)
    machine.append("proc/meminfo", "CommitLimit: 1000 kB\nCommitted_AS: 99999999 kB\nSwapFree: 0 kB")
    check_host(PUBLISHED_K3, settings(), root=tmp_path)


def test_the_processes_counted_are_no_larger_than_real_ones() -> None:
    service = RunningService(["--model", str(MODEL), "--tp", "2", "--capacities", "64"]).wait_ready()
    anonymous = {pid: private_bytes(pid) for pid in descendants(service.process.pid)}
    assert service.stop() == 0
    decoders, torches = sorted(anonymous.values())[:-3], sorted(anonymous.values())[-3:]
    assert len(decoders) >= 2
    assert min(decoders) >= _DECODE_PROCESS_BYTES and max(decoders) < 2 * _DECODE_PROCESS_BYTES
    assert min(torches) >= _TORCH_PROCESS_BYTES and max(torches) < 2 * _TORCH_PROCESS_BYTES


def private_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A real memory cgroup of this machine, without a limit yet; what is still in it at the end is killed."""
    hierarchies = list(host_memory._own_cgroups(Path("/")))
    for version, mount, _ in hierarchies:
        group = mount / f"tpvision-test-{os.getpid()}"
        with contextlib.suppress(OSError):
            group.mkdir()
            if (group / version.limit).exists():
                yield group
                for pid in (group / "cgroup.procs").read_text().split():
                    os.kill(int(pid), 9)
                group.rmdir()
                return
            group.rmdir()
    pytest.skip("no memory cgroup can be made on this machine")


def set_limit(group: Path, num_bytes: int) -> None:
    version_1 = group / "memory.limit_in_bytes"
    (version_1 if version_1.exists() else group / "memory.max").write_text(str(num_bytes))


def inside(group: Path) -> list[str]:
    return ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$0" "$@"', *COMMAND]


@pytest.mark.parametrize("command", ["serve", "worker"])
def test_in_a_real_cgroup_tiers_that_do_not_fit_end_the_start(cgroup: Path, command: str, tmp_path: Path) -> None:
    set_limit(cgroup, 700 * MIB)
    arguments = [command, "--model", str(MODEL), "--tp", "2", "--device", "cpu", "--capacities", "64,1000000"]
    ended = subprocess.run(
        [*inside(cgroup), *arguments, "--port", "0", "--socket", str(tmp_path / "socket")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2, ended.stderr
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("tpvision: the tiers do not fit the memory of this machine")
    assert f"limit of {700 * MIB:,} of the cgroup {cgroup}" in last
    assert "Traceback" not in ended.stderr
    assert (cgroup / "cgroup.procs").read_text() == ""


def test_in_a_real_cgroup_the_tier_that_is_told_to_fit_serves(cgroup: Path) -> None:
    set_limit(cgroup, 900 * MIB)
    arguments = ["--model", str(MODEL), "--tp", "2"]
    refused = RunningService([*arguments, "--capacities", "64,1000000"], command=inside(cgroup))
    assert refused.process.wait(60) == 2
    refused.stop()
    found = re.search(r"tier that would fit: ([\d,]+) patches", refused.log[-1])
    assert found
    # Half of it: a little less than what processes really take is counted, and the kernel kills without asking.
    tier = int(found[1].replace(",", "")) // 8 * 4
    assert tier > 4096
    service = RunningService([*arguments, "--capacities", f"64,{tier}"], command=inside(cgroup)).wait_ready()
    assert service.encode(GOOD).status_code == 200
    assert service.stop() == 0
