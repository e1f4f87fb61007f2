"""How much memory this machine, and the cgroups around this process, still allow.

Counted is what can be had without the kernel killing somebody for it: the machine's MemAvailable, and for each memory
cgroup from our own up to its root, v2 and v1, the limit less what is used, plus the file pages that would be dropped.
Swap is not counted, and neither are limits on address space: only pages that are touched take memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tp.settings import Settings

ROOT = Path("/")
_GPU_NODES = ("dev/nvidiactl", "dev/dxg", "dev/kfd")  # without one of them torch sees no GPU
_V1_NO_LIMIT = 2**60  # v1 writes the largest number of pages that fits its counter


@dataclass(frozen=True, slots=True)
class Available:
    """Bytes that can be had, and what bounds them."""

    num_bytes: int
    bound: str


@dataclass(frozen=True, slots=True)
class _Version:
    """The files of one version of memory cgroups, and which pages of `memory.stat` can be dropped."""

    limit: str
    usage: str
    file_pages: tuple[str, str]  # shared memory is not among them; cgroups below are


_V2 = _Version("memory.max", "memory.current", ("inactive_file", "active_file"))
_V1 = _Version("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))


def available(root: Path = ROOT) -> Available:
    """The least that the machine and the cgroups allow. `root` is where proc and sys are."""
    return min((_of_machine(root), *_of_cgroups(root)), key=lambda found: found.num_bytes)


def may_have_gpu(settings: Settings, root: Path = ROOT) -> bool:
    """Whether ranks may run on GPUs; they alone can tell for certain, as they alone have torch."""
    device = settings.parallel.device
    return device == "cuda" or (device == "auto" and any((root / node).exists() for node in _GPU_NODES))


def _of_machine(root: Path) -> Available:
    fields = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
    return Available(1024 * int(fields["MemAvailable"].split()[0]), "MemAvailable of the machine")


def _of_cgroups(root: Path) -> Iterator[Available]:
    for version, mount, folder in _own_cgroups(root):
        for group in (folder, *folder.parents):
            found = _of_cgroup(group, version)
            if found is not None:
                yield found
            if group == mount:
                break


def _own_cgroups(root: Path) -> Iterator[tuple[_Version, Path, Path]]:
    """(version, mount point, our own cgroup below it) of each hierarchy that may account memory."""
    paths = {}
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            paths[_V2] = path
        elif "memory" in controllers.split(","):
            paths[_V1] = path
    for line in (root / "proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split()
        version = {"cgroup2": _V2, "cgroup": _V1}.get(kind)
        if version in paths and (version is _V2 or "memory" in options.split(",")):
            top, mounted_at = before.split()[3:5]
            mount = root / mounted_at.lstrip("/")
            inside = Path(paths[version]).is_relative_to(top)  # not so for a container that sees the host's paths
            yield version, mount, mount / Path(paths[version]).relative_to(top) if inside else mount


def _of_cgroup(group: Path, version: _Version) -> Available | None:
    """None where it sets no limit."""
    try:
        limit = (group / version.limit).read_text().strip()
        if limit == "max" or int(limit) >= _V1_NO_LIMIT:
            return None
        used = int((group / version.usage).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:  # the root of v2 has no such files, and neither has a hierarchy without the memory controller
        return None
    droppable = sum(int(stat.get(name, 0)) for name in version.file_pages)
    return Available(max(0, int(limit) - used + droppable), f"limit of {int(limit):,} of the cgroup {group}")
