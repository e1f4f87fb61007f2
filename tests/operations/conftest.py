"""After `pytest -m operations`: a table of which checks ran, and which could not and why."""

from collections import defaultdict
from pathlib import Path

import pytest

_HERE = Path(__file__).parent


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if "operations" not in config.option.markexpr:
        return
    here = str(_HERE.relative_to(config.rootpath))
    checks: dict[tuple[str, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            path, _, name = report.nodeid.partition("::")
            if path.startswith(here):
                row = checks[Path(path).stem.removeprefix("test_"), name.partition("[")[0].removeprefix("test_")]
                row[outcome] += 1
    for report in terminalreporter.getreports(""):
        pass
    terminalreporter.section("operator's kit: what ran")
    for (module, name), row in sorted(checks.items()):
        result = ", ".join(f"{count:.0f} {outcome}" for outcome, count in row.items())
        terminalreporter.write_line(f"{module:<12} {name.replace('_', ' '):<90} {result}")
