"""What the machine and its cgroups allow, read from made-up proc and sys folders of each kind."""

import os
from pathlib import Path

import pytest
from made_machine import GIB, Machine

from service.host_memory import Available, available, may_have_gpu
from tp.settings import load_settings


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_cgroups_it_is_what_the_machine_has_available(machine: Machine) -> None:
    assert available(machine.root) == Available(8 * GIB, "MemAvailable of the machine")


def test_a_containers_limit_counts_less_what_is_used_and_cannot_be_dropped(machine: Machine) -> None:
    machine.mount(version=2, own="/")
    machine.limit("", 4 * GIB, used=3 * GIB, file_pages=GIB)
    found = available(machine.root)
    assert found.num_bytes == 2 * GIB
    assert f"{4 * GIB:,}" in found.bound


@pytest.mark.parametrize("prefix", ["", "memory/"])
def test_the_tightest_of_a_cgroup_and_those_above_it_counts(machine: Machine, prefix: str) -> None:
    machine.mount(version=1 if prefix else 2, own="/pods/pod7/box")
    no_limit = 9223372036854771712 if prefix else "max"
    machine.limit(f"{prefix}pods", 6 * GIB, used=5 * GIB)
    machine.limit(f"{prefix}pods/pod7", no_limit, used=GIB)
    machine.limit(f"{prefix}pods/pod7/box", 4 * GIB, used=GIB)
    assert available(machine.root).num_bytes == GIB
    machine.limit(f"{prefix}pods/pod7/box", 4 * GIB, used=4 * GIB, file_pages=GIB // 2)
    assert available(machine.root).num_bytes == GIB // 2


def test_a_machine_with_less_than_the_limit_counts(tmp_path: Path) -> None:
    machine = Machine(tmp_path, available_bytes=GIB)
    machine.mount(version=2, own="/box")
    machine.limit("box", 400 * GIB)
    assert available(machine.root).num_bytes == GIB


@pytest.mark.parametrize(("version", "prefix"), [(1, "memory"), (2, "")])
@pytest.mark.parametrize("top", ["/docker/abc", "/"])
def test_a_container_that_sees_the_hosts_path_finds_its_own_limit(
    machine: Machine, version: int, prefix: str, top: str
) -> None:
    own = "/docker/abc" if top != "/" else "/../docker/abc"  # as seen from another cgroup namespace
    machine.mount(version=version, own=own, top=top)
    machine.limit(prefix, GIB)
    assert available(machine.root).num_bytes == GIB


def test_both_versions_side_by_side(machine: Machine) -> None:
    machine.mount(version=1, own="/box")
    machine.mount(version=2, own="/box")  # without the memory controller, and so without its files
    machine.limit("memory/box", GIB)
    assert available(machine.root).num_bytes == GIB


def test_more_used_than_allowed_leaves_nothing(machine: Machine) -> None:
    machine.mount(version=2, own="/")
    machine.limit("", GIB, used=2 * GIB)
    assert available(machine.root).num_bytes == 0


def test_this_machine_has_some_and_no_more_than_it_has() -> None:
    assert 0 < available().num_bytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("device", "node", "may"),
    [("cpu", True, False), ("cuda", False, True), ("auto", False, False), ("auto", True, True)],
)
def test_ranks_may_be_on_gpus_where_one_is_asked_for_or_there(
    machine: Machine, device: str, node: bool, may: bool
) -> None:
    if node:
        machine.write("dev/nvidiactl", "")
    assert may_have_gpu(load_settings(flags={"parallel.device": device}).settings, machine.root) is may
