"""After `pytest -m operations`: a table of which checks ran, which could not and why, and what was measured."""

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import pytest

_OUTCOMES = ("passed", "failed", "error", "skipped")


@dataclass
class Check:
    """A test function, over all its parameters."""

    outcomes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_OUTCOMES, 0))
    seconds: float = 0.0
    reasons: set[str] = field(default_factory=set)  # why it was skipped
    figures: list[str] = field(default_factory=list)  # that it measured, by the fixture record_property

    @property
    def result(self) -> str:
        return ", ".join(f"{count} {outcome}" for outcome, count in self.outcomes.items() if count)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if "operations" not in config.option.markexpr:
        return
    checks: defaultdict[tuple[str, str], Check] = defaultdict(Check)
    for outcome in (*_OUTCOMES, ""):  # "": set-up and tear-down
        for report in terminalreporter.getreports(outcome):
            check = checks[_place(report.nodeid)]
            check.seconds += report.duration
            if outcome:
                check.outcomes[outcome] += 1
            if outcome == "skipped":
                check.reasons.add(report.longrepr[2].removeprefix("Skipped: "))
            if report.when == "call":
                check.figures += [f"{name}: {value}" for name, value in report.user_properties]
    terminalreporter.section("operator's kit: what ran")
    for (module, name), check in sorted(checks.items()):
        line = f"{module:<12} {name:<86} {check.result:>11} {check.seconds:6.1f} s"
        terminalreporter.write_line("  ".join([line, *sorted(check.reasons)]))
    for figure in sorted(figure for check in checks.values() for figure in check.figures):
        terminalreporter.write_line(figure)


def _place(nodeid: str) -> tuple[str, str]:
    path, _, name = nodeid.partition("::")
    return Path(path).stem.removeprefix("test_"), name.partition("[")[0].removeprefix("test_").replace("_", " ")
