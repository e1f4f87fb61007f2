"""Reports: the table and the JSON are made of the same values."""

import io
import subprocess
from dataclasses import dataclass, replace

import pytest
from rich.console import Console
from running import ROOT

from service.bench.findings import COLUMNS, Finding
from service.bench.report import Column, Header, Report, number, quantile


@dataclass(frozen=True)
class Row:
    name: str
    seconds: float
    peak_bytes: int | None

    @property
    def rate(self) -> float:
        return 1 / self.seconds


COLUMNS_OF_ROW = (
    Column("name", "who"),
    Column("seconds"),
    Column("rate", "per s", number("{:.1f}")),
    Column("peak_bytes", "MB", number("{:.0f}", 1e6)),
)
ROWS = (Row("[bold]one", 0.25, 3_000_000), Row("two", 0.5, None))


def report_of(*, is_upright: bool = True) -> Report:
    return Report("title", Header.of_this_machine(), COLUMNS_OF_ROW, ROWS, ("a note",), is_upright)


def text_of(report: Report) -> str:
    console = Console(file=io.StringIO(), width=200, color_system=None)
    console.print(report.render())
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def cells(text: str) -> list[list[str]]:
    """The words between the lines of a table, row by row; the headings first."""
    lines = [line for line in text.splitlines() if line[:1] in ("┃", "│")]
    return [[cell.strip() for cell in line.strip("┃│").replace("┃", "│").split("│")] for line in lines]


def test_table_and_json_agree() -> None:
    report = report_of()
    assert [row["name"] for row in report.as_dict()["rows"]] == ["[bold]one", "two"]
    assert report.as_dict()["rows"][0] == {"name": "[bold]one", "seconds": 0.25, "rate": 4.0, "peak_bytes": 3_000_000}
    shown = cells(text_of(report))
    assert shown == [["who", "per s", "MB"], ["[bold]one", "4.0", "3"], ["two", "2.0", "–"]]


def test_a_column_without_a_value_is_in_the_json_alone() -> None:
    report = replace(report_of(), rows=ROWS[1:])
    assert cells(text_of(report)) == [["who", "per s"], ["two", "2.0"]]
    assert report.as_dict()["rows"][0]["peak_bytes"] is None


def test_a_table_on_its_side_has_the_same_cells() -> None:
    upright, turned = (cells(text_of(report_of(is_upright=is_upright))) for is_upright in (True, False))
    assert [list(column) for column in zip(*upright, strict=True)] == turned


def test_the_header_says_where_and_when() -> None:
    header = report_of().as_dict()["header"]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    assert header["cores"] >= 1 and header["date"].endswith("UTC") and header["torch"].startswith("2.")
    assert (header["commit"] is None) == (commit == "")
    if header["commit"] is not None:
        assert commit.startswith(header["commit"].removesuffix("+"))
    assert header["cpu"] in text_of(report_of())


def test_notes_stand_below() -> None:
    assert text_of(report_of()).splitlines()[-1] == "a note"


@pytest.mark.parametrize(("share", "value"), [(0.5, 5), (0.9, 9), (0.99, 10), (0.01, 1), (1, 10)])
def test_quantiles_of_ten(share: float, value: int) -> None:
    assert quantile([10, 1, 9, 2, 8, 3, 7, 4, 6, 5], share) == value


def test_a_lone_value_is_every_quantile() -> None:
    assert quantile([3.0], 0.5) == quantile([3.0], 0.99) == 3.0


@pytest.mark.parametrize(
    ("finding", "ratio", "is_met", "verdict"),
    [
        (Finding("x", 3.0, "ms", reference=2.0, target=1.5), 1.5, True, "met"),
        (Finding("x", 3.1, "ms", reference=2.0, target=1.5), 1.55, False, "missed"),
        (Finding("x", 3.0, "ms", reference=2.0, target=1.6, target_is="at least"), 1.5, False, "missed"),
        (Finding("x", 3.0, "ms", target=3), None, True, "met"),
        (Finding("x", 3.0, "ms", target=2, is_disturbed=True), None, False, "missed (disturbed)"),
        (Finding("x", 3.0, "ms"), None, None, ""),
    ],
)
def test_a_finding_is_judged_by_its_ratio_or_its_value(
    finding: Finding, ratio: float | None, is_met: bool | None, verdict: str
) -> None:
    assert finding.ratio == pytest.approx(ratio)
    assert (finding.is_met, finding.verdict) == (is_met, verdict)


def test_findings_show_what_their_json_says() -> None:
    finding = Finding("a start", 6.0, "s", reference=5.0, reference_what="the least", target=1.3, others_share=0.01)
    report = Report("title", Header.of_this_machine(), COLUMNS, [finding])
    assert cells(text_of(report))[1] == ["a start", "6 s", "5 s: the least", "1.20", "at most 1.3 x", "met", "1.0%"]
    row = report.as_dict()["rows"][0]
    assert (row["value"], row["reference"], row["ratio"], row["is_met"]) == (6.0, 5.0, 1.2, True)
    assert not [name for name in row if name.startswith("shown")]
