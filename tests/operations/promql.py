"""The expressions of board, rules and autoscaler, and the metrics that they name."""

import json
import re
from dataclasses import dataclass
from typing import Any

import yaml
from chart import DEPLOY, Rendered

BOARD: dict[str, Any] = json.loads((DEPLOY / "dashboards" / "tpvision.json").read_text())
RULES_FILE = DEPLOY / "alerts" / "tpvision.rules.yaml"
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load(RULES_FILE.read_text())["groups"] for rule in group["rules"]
]
_NAME = re.compile(r"\b(?:tpvision_\w+|process_\w+|up)\b(?=\s*[{\[)/\s>=-]|$)")


@dataclass(frozen=True)
class Expression:
    """One expression, and where it stands."""

    where: str
    text: str

    @property
    def metrics(self) -> set[str]:
        """Names of series, those of recording rules apart."""
        without_labels = re.sub(r"\{[^}]*\}|by \([^)]*\)", "{", self.text)
        return set(_NAME.findall(without_labels))

    def labels_by_metric(self) -> list[tuple[str, set[str]]]:
        """The labels that each metric is selected by; and grouped by, where one metric is all the expression has."""
        selected = [
            (name, set(re.findall(r"(\w+)\s*=", inner)))
            for name, inner in re.findall(r"\b((?:tpvision|process)_\w+){([^}]*)}", self.text)
        ]
        grouped = {label for inner in re.findall(r"by \(([^)]*)\)", self.text) for label in inner.split(", ")}
        return selected + [(name, grouped) for name in self.metrics if len(self.metrics) == 1]


def board_expressions() -> list[Expression]:
    """Of all panels and annotations, Grafana's variables replaced as Grafana does."""
    found = [(f"panel {panel['title']}", target) for panel in BOARD["panels"] for target in panel.get("targets", [])]
    found += [(f"annotation {each['name']}", each) for each in BOARD["annotations"]["list"]]
    return [Expression(where, _substituted(target["expr"])) for where, target in found]


def rule_expressions() -> list[Expression]:
    return [Expression(rule.get("alert") or rule["record"], rule["expr"]) for rule in RULES]


def scaler_expressions(rendered: Rendered) -> list[Expression]:
    """What KEDA asks, and what an adapter gives an HPA."""
    queries = [
        trigger["metadata"]["query"] for each in rendered.all("ScaledObject") for trigger in each["spec"]["triggers"]
    ]
    queries += [
        metric["pods"]["metric"]["name"]
        for each in rendered.all("HorizontalPodAutoscaler")
        for metric in each["spec"]["metrics"]
    ]
    return [Expression("autoscaler", query) for query in queries]


def _substituted(text: str) -> str:
    values = {"$job": ".*", "$instance": ".*", "$__rate_interval": "1m", "$__range": "1h"}
    for name, value in values.items():
        text = text.replace(name, value)
    return text
