"""deploy/README.md: the tests, files and settings that it names are there."""

import re

import pytest
from chart import CHART, DEPLOY, anchors
from tools import ROOT

from tp.settings import known_names

pytestmark = pytest.mark.operations
TEXT = (DEPLOY / "README.md").read_text()


@pytest.mark.parametrize("test", sorted(set(re.findall(r"tests/[\w/]+\.py::\w+", TEXT))))
def test_each_symptom_is_brought_about_by_a_test(test: str) -> None:
    path, _, name = test.partition("::")
    assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.MULTILINE)


def test_settings_that_it_names_are_settings() -> None:
    sections = {name.partition(".")[0] for name, _ in known_names()}
    named = {name for name in re.findall(r"`(?:settings\.)?(\w+\.\w+)", TEXT) if name.partition(".")[0] in sections}
    of_the_chart = set(re.findall(r"^  (\w+):", (CHART / "values.yaml").read_text(), re.MULTILINE))
    assert {name for name in named if name.partition(".")[2] not in of_the_chart} <= {name for name, _ in known_names()}


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)]+)\)", TEXT))))
def test_links_lead_somewhere(link: str) -> None:
    name, _, anchor = link.partition("#")
    target = DEPLOY / (name or "README.md")
    assert target.exists()
    assert not anchor or anchor in anchors(target)
