"""A real Prometheus scrapes the real service: every expression of board, rules and autoscaler has an answer there."""

import itertools
import math
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from chart import EVERYTHING, Rendered, helm_template
from make_photograph import PHOTOGRAPH
from promql import RULES, RULES_FILE, Expression, board_expressions, rule_expressions, scaler_expressions
from running import GOLDEN, RunningService, Scrape, ranks_of, wait_until
from tools import run, tool

pytestmark = pytest.mark.operations
SMALL = (GOLDEN / "images" / "rgb_64x48.png").read_bytes()
TARGET_LABELS = {"job", "instance", "namespace", "service"}  # Prometheus' own, and what the ServiceMonitor adds
BOARD_AND_RULES = [*board_expressions(), *rule_expressions()]
SCALER = Expression(
    "autoscaler",
    'sum(avg_over_time(tpvision_queue_cost_seconds{namespace="tpvision",service="tpvision-metrics"}[1m]))',
)


class Prometheus:
    """A server of its own, with our rules, that scrapes one target every second."""

    def __init__(self, folder: Path, target: str) -> None:
        labels = {"namespace": "tpvision", "service": "tpvision-metrics"}
        job = {"job_name": "tpvision-metrics", "static_configs": [{"targets": [target], "labels": labels}]}
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(RULES_FILE)],
            "scrape_configs": [job],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        run(tool("promtool"), "check", "config", folder / "prometheus.yml")
        options = (f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data")
        self._log = folder / "log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [tool("prometheus"), *options, "--web.listen-address=127.0.0.1:0"], stderr=log
            )
        wait_until(lambda: "Listening on" in self._log.read_text())
        address = re.findall(r'msg="Listening on" address=(\S+)', self._log.read_text())[0]
        self._client = httpx.Client(base_url=f"http://{address}/api/v1", trust_env=False)

    def get(self, path: str, **query: str) -> Any:
        answer = self._client.get(path, params=query).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def values(self, expression: str) -> list[float]:
        """Of an instant query; those that are numbers."""
        numbers = [float(each["value"][1]) for each in self.get("/query", query=expression)["result"]]
        return [number for number in numbers if not math.isnan(number)]

    def stop(self) -> None:
        self._client.close()
        self._process.terminate()
        self._process.wait(10)


class Watched:
    """The service with some load on it, one loss behind it, and a Prometheus that saw both."""

    def __init__(self, service: RunningService, folder: Path) -> None:
        self.service = service
        self._enough = threading.Event()
        self._probes = re.findall(r"probes at http://([\d.:]+)", "".join(service.log))[0]
        self.prometheus = Prometheus(folder, self._probes)
        self._load = threading.Thread(target=self._send)
        self._load.start()

    @property
    def metrics(self) -> str:
        return httpx.get(f"http://{self._probes}/metrics", trust_env=False).text

    def lose_a_rank(self) -> None:
        wait_until(lambda: bool(self.prometheus.values("tpvision_lost_ranks_total")))  # for the step to be seen
        os.kill(ranks_of(self.service)[0], signal.SIGKILL)
        wait_until(lambda: self.service.client.get("/readyz").status_code == 200, timeout_s=30)

    def stop(self) -> None:
        self._enough.set()
        self._load.join()
        self.prometheus.stop()

    def _send(self) -> None:
        """All forms, an image that is downscaled, one that is refused."""
        url = f"{self.service.url}/v1/encode"
        with httpx.Client(timeout=60, trust_env=False) as client:
            for number in itertools.count():
                if self._enough.wait(0.1):
                    return
                accept = ("*/*", "application/json", "application/octet-stream", "application/x-npy")[number % 4]
                client.post(url, content=SMALL, headers={"accept": accept})
                client.post(url, content=PHOTOGRAPH.read_bytes())
                client.post(url, content=PHOTOGRAPH.read_bytes(), params={"oversize": "refuse"})


@pytest.fixture(scope="module")
def watched(start_service: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    tool("prometheus"), tool("promtool")
    service = start_service(
        *("--model", str(GOLDEN / "tiny-k3-f32"), "--tp", "2", "--policy", "downscale", "--capacities", "64,256"),
        TPVISION_CAPACITY__ALLOW_OVERRIDE="any",
        TPVISION_SERVER__PROBE_PORT="0",
    )
    watched = Watched(service, tmp_path_factory.mktemp("prometheus"))
    try:
        watched.lose_a_rank()
        yield watched
    finally:
        watched.stop()


def test_promtool_check_metrics(watched: Watched) -> None:
    run(tool("promtool"), "check", "metrics", content=watched.metrics)


@pytest.mark.parametrize("expression", [*board_expressions(), SCALER], ids=lambda each: each.where)
def test_expression_has_a_value(watched: Watched, expression: Expression) -> None:
    wait_until(lambda: bool(watched.prometheus.values(expression.text)), timeout_s=20)


def test_rules_are_healthy_and_record_values(watched: Watched) -> None:
    names = [rule["record"] for rule in RULES if "record" in rule]
    wait_until(lambda: [name for name in names if not watched.prometheus.values(name)] == [], timeout_s=20)
    rules = [rule for group in watched.prometheus.get("/rules")["groups"] for rule in group["rules"]]
    assert len(rules) == len(RULES)
    assert {rule["health"] for rule in rules} == {"ok"}


def test_a_lost_rank_and_refused_images_raise_their_alerts(watched: Watched) -> None:
    def states() -> dict[str, str]:
        alerts = watched.prometheus.get("/alerts")["alerts"]
        return {alert["labels"]["alertname"]: alert["state"] for alert in alerts}

    wait_until(lambda: states().get("TpvisionRankLost") == "firing", timeout_s=20)
    wait_until(lambda: states().get("TpvisionImagesTooLarge") == "pending", timeout_s=20)
    assert [name for name, state in states().items() if state == "firing"] == ["TpvisionRankLost"]


def test_every_metric_and_label_named_is_exposed(watched: Watched) -> None:
    labels: dict[str, set[str]] = {"up": set()}
    for sample in Scrape(watched.metrics).samples:
        labels.setdefault(sample.name, set()).update(sample.labels)
    scalers = [each for path in EVERYTHING for each in scaler_expressions(Rendered(helm_template(path)))]
    assert SCALER in scalers
    for expression in [*BOARD_AND_RULES, *scalers]:
        assert expression.metrics <= labels.keys(), expression
        for name, used in expression.labels_by_metric():
            assert used - TARGET_LABELS <= labels[name], (expression, name)


def test_series_of_the_alerts_tests_are_exposed(watched: Watched) -> None:
    exposed = set(re.findall(r"^(\w+)", watched.metrics, re.MULTILINE))
    cases = yaml.safe_load(RULES_FILE.with_name("tpvision.test.yaml").read_text())["tests"]
    named = {each["series"].partition("{")[0] for case in cases for each in case["input_series"]}
    assert named <= exposed | {"up"}
