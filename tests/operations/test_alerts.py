"""The alerting rules as Prometheus' own tool sees them: well-formed, and each tried where it fires and where not."""

import re
from typing import Any

import pytest
import yaml
from chart import DEPLOY, anchors
from promql import RULES, RULES_FILE
from tools import run, tool

pytestmark = pytest.mark.operations
TESTS_FILE = RULES_FILE.with_name("tpvision.test.yaml")
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}


def test_promtool_check_rules() -> None:
    run(tool("promtool"), "check", "rules", "--lint=all", "--lint-fatal", RULES_FILE)


def test_promtool_test_rules() -> None:
    run(tool("promtool"), "test", "rules", TESTS_FILE)


@pytest.mark.parametrize("name", ALERTS)
def test_each_alert_is_tried_firing_and_quiet(name: str) -> None:
    tried = [
        case
        for each in yaml.safe_load(TESTS_FILE.read_text())["tests"]
        for case in each.get("alert_rule_test", [])
        if case["alertname"] == name
    ]
    assert {bool(case["exp_alerts"]) for case in tried} == {True, False}


@pytest.mark.parametrize("name", ALERTS)
def test_each_alert_leads_to_what_to_do(name: str) -> None:
    rule: dict[str, Any] = ALERTS[name]
    path, _, anchor = rule["annotations"]["runbook"].partition("#")
    assert anchor in anchors(DEPLOY.parent / path)
    assert rule["labels"]["severity"] in ("critical", "warning", "info")


def test_recorded_names_are_used_as_they_are_recorded() -> None:
    recorded = {rule["record"] for rule in RULES if "record" in rule}
    used = {name for rule in ALERTS.values() for name in re.findall(r"tpvision:[\w:]+", rule["expr"])}
    assert used == recorded
