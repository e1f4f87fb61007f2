"""The Grafana board as far as it can be checked without Grafana; test_prometheus.py runs its expressions."""

import itertools
import re
from typing import Any

import pytest
from promql import BOARD

pytestmark = pytest.mark.operations
PANELS: list[dict[str, Any]] = BOARD["panels"]
VARIABLES = {each["name"] for each in BOARD["templating"]["list"]}


def cells(panel: dict[str, Any]) -> set[tuple[int, int]]:
    at = panel["gridPos"]
    return set(itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])))


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    assert max(panel["gridPos"]["x"] + panel["gridPos"]["w"] for panel in PANELS) == 24
    for one, other in itertools.combinations(PANELS, 2):
        assert not cells(one) & cells(other), (one["title"], other["title"])


def test_every_panel_asks_the_chosen_data_source_for_the_chosen_jobs() -> None:
    for panel in PANELS:
        for target in panel.get("targets", []):
            assert target["datasource"]["uid"] == panel["datasource"]["uid"] == "${datasource}"
            selectors = re.findall(r"(?:tpvision|process)_\w+\{([^}]*)\}", target["expr"])
            assert selectors
            assert all('job=~"$job",instance=~"$instance"' in each for each in selectors), panel["title"]


def test_variables_are_defined() -> None:
    used = {name for panel in PANELS for target in panel.get("targets", []) for name in _variables(target["expr"])}
    assert used == VARIABLES - {"datasource"}


def test_panels_have_units_and_titles() -> None:
    for panel in PANELS:
        if panel["type"] != "row":
            assert panel["title"]
            assert panel["fieldConfig"]["defaults"]["unit"]


def _variables(text: str) -> list[str]:
    return [name for name in re.findall(r"\$(\w+)", text) if not name.startswith("__")]
