"""A made-up machine for tests: a root folder with the files of /proc and /sys that tell how much memory there is."""

from pathlib import Path

GIB = 2**30


class Machine:
    """A root folder with /proc and /sys of a machine; cgroups are added to it."""

    def __init__(self, root: Path, *, available_bytes: int = 8 * GIB) -> None:
        self.root = root
        self.write(
            "proc/meminfo", f"MemTotal: 99999999 kB\nMemFree: 1 kB\nMemAvailable: {available_bytes // 1024} kB\n"
        )
        self.write("proc/self/cgroup", "")
        self.write("proc/self/mountinfo", "22 1 0:21 / /proc rw,relatime - proc proc rw\n")

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def append(self, path: str, line: str) -> None:
        self.write(path, (self.root / path).read_text() + line + "\n")

    def mount(self, *, version: int, own: str, top: str = "/") -> None:
        """One hierarchy, in which this process is in the cgroup `own` and whose mount shows what is below `top`."""
        if version == 2:
            self.append("proc/self/cgroup", f"0::{own}")
            self.append("proc/self/mountinfo", f"33 1 0:3 {top} /sys/fs/cgroup rw shared:9 - cgroup2 cgroup2 rw")
        else:
            self.append("proc/self/cgroup", f"4:memory:{own}")
            self.append("proc/self/cgroup", "3:cpu,cpuacct:/elsewhere")
            self.append("proc/self/mountinfo", "31 1 0:1 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct")
            self.append("proc/self/mountinfo", f"32 1 0:2 {top} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory")

    def limit(self, path: str, limit: object, *, used: int = 0, file_pages: int = 0) -> None:
        """Of the v2 cgroup at `path` below its mount point, or, if it starts with `memory`, a v1 one."""
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file")
        if not path.startswith("memory"):
            names = ("memory.max", "memory.current", "inactive_file", "active_file")
        folder = f"sys/fs/cgroup/{path}".rstrip("/")
        self.write(f"{folder}/{names[0]}", f"{limit}\n")
        self.write(f"{folder}/{names[1]}", f"{used}\n")
        stat = {"anon": used, "shmem": used, names[2]: file_pages // 4, names[3]: file_pages - file_pages // 4}
        self.write(f"{folder}/memory.stat", "".join(f"{name} {value}\n" for name, value in stat.items()))
