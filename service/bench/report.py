"""What a benchmark found: a table for a person and JSON for a program, made of the same values, under one header."""

import math
import os
import platform
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from service.version import installed_version

_ROOT = Path(__file__).parents[2]
_NO_VALUE = "–"
_INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8")
_ARM_INSTRUCTION_SETS = ("asimd", "bf16", "sve", "sve2")


class BenchError(RuntimeError):
    """A benchmark cannot be run here, or what it started ended early."""


@dataclass(frozen=True, slots=True)
class Header:
    """Where and when, so that figures can be compared."""

    date: str  # UTC
    cpu: str
    cores: int
    instruction_sets: Sequence[str]
    python: str
    torch: str | None
    tpvision: str
    commit: str | None  # with + where files differ from it; None outside a checkout

    @classmethod
    def of_this_machine(cls) -> "Header":
        """As it is now."""
        cpu, flags = _cpu()
        return cls(
            date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            cpu=cpu,
            cores=len(os.sched_getaffinity(0)),
            instruction_sets=[name for name in (*_INSTRUCTION_SETS, *_ARM_INSTRUCTION_SETS) if name in flags],
            python=platform.python_version(),
            torch=_version("torch"),
            tpvision=installed_version(),
            commit=_commit(),
        )

    def sentence(self) -> str:
        """One line for a person."""
        return (
            f"{self.date}; {self.cpu}, {self.cores} cores ({' '.join(self.instruction_sets)}); Python {self.python}, "
            f"torch {self.torch or 'not installed'}, tpvision {self.tpvision} ({self.commit or 'no commit known'})"
        )


@dataclass(frozen=True, slots=True)
class Column:
    """An attribute of every row: its name, also in JSON; how a table shows it, where that has a heading for it."""

    name: str
    heading: str | None = None
    show: Callable[[Any], str] = str
    in_json: bool = True  # else only in the table, made of other columns

    def cell(self, row: Any) -> str:
        """The value as shown; a dash where there is none."""
        value = getattr(row, self.name)
        return _NO_VALUE if value is None else self.show(value)


def number(form: str, unit: float = 1) -> Callable[[float], str]:
    """Shows a value in that unit."""
    return lambda value: form.format(value / unit)


@dataclass(frozen=True, slots=True)
class Report:
    """Rows of one kind, all of them with the attributes that the columns name."""

    title: str
    header: Header
    columns: Sequence[Column]
    rows: Sequence[Any]
    notes: Sequence[str] = ()
    is_upright: bool = True  # a line for each row; else for each column

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values, unrounded."""
        names = [column.name for column in self.columns if column.in_json]
        rows = [{name: getattr(row, name) for name in names} for row in self.rows]
        return {"title": self.title, "header": asdict(self.header), "rows": rows, "notes": list(self.notes)}

    def render(self) -> RenderableType:
        """The table, between the header and the notes, without columns in which no row has a value."""
        shown = [
            column
            for column in self.columns
            if column.heading is not None and any(column.cell(row) not in ("", _NO_VALUE) for row in self.rows)
        ]
        cells = [
            [str(column.heading) for column in shown],
            *([column.cell(row) for column in shown] for row in self.rows),
        ]
        headings, *lines = cells if self.is_upright else zip(*cells, strict=True)
        table = Table(title=self.title)
        for heading in headings:
            table.add_column(escape(heading), overflow="fold")
        for line in lines:
            table.add_row(*map(escape, line))
        return Group(escape(self.header.sentence()), table, *map(escape, self.notes))


def quantile(values: Sequence[float], share: float) -> float:
    """The least value that at least `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _cpu() -> tuple[str, set[str]]:
    """Model name and flags, as far as /proc/cpuinfo tells."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return fields.get("model name", platform.machine()), set(fields.get("flags", fields.get("features", "")).split())


def _commit() -> str | None:
    command = ["git", "-C", str(_ROOT), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    if not (_ROOT / ".git").exists():
        return None
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
