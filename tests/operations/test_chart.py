"""The chart as Helm sees it: it lints, renders and packs with every values file, and refuses what it does not know."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart import CHART, EVERYTHING, MANIFESTS, NAMES, VALUES, Rendered, helm_template
from derived import SCHEMA, manifest, values_schema
from tools import run, tool

pytestmark = pytest.mark.operations
FILES = [*(VALUES / f"{name}.yaml" for name in NAMES), *EVERYTHING]


@pytest.mark.parametrize("values", FILES, ids=lambda path: path.stem)
def test_helm_lint(values: Path) -> None:
    run(tool("helm"), "lint", "--strict", CHART, "--values", values)


@pytest.mark.parametrize("values", FILES, ids=lambda path: path.stem)
def test_helm_template(values: Path) -> None:
    assert Rendered(helm_template(values)).pod["spec"]["containers"]


def test_helm_package_holds_the_whole_chart(tmp_path: Path) -> None:
    run(tool("helm"), "package", CHART, "--destination", tmp_path)
    (package,) = tmp_path.glob("*.tgz")
    everything = EVERYTHING[0]
    assert helm_template(everything, chart=package) == helm_template(everything)


def test_names_are_short_enough_for_the_longest_release() -> None:
    objects = Rendered(helm_template(EVERYTHING[1], release="r" * 53)).objects
    assert max(len(each["metadata"]["name"]) for each in objects) <= 63


@pytest.mark.parametrize("name", NAMES)
def test_plain_manifests_are_current(name: str) -> None:
    assert (MANIFESTS / f"{name}.yaml").read_text() == manifest(name), "run tests/operations/derived.py"


def test_there_is_a_manifest_for_each_values_file_and_no_other() -> None:
    assert sorted(path.stem for path in MANIFESTS.glob("*.yaml")) == NAMES


def test_schema_of_settings_is_the_settings_model() -> None:
    assert SCHEMA.read_text() == values_schema(), "run tests/operations/derived.py"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"replica": 2}, ["replica"]),
        ({"settings": {"limits": {"max_queue": 5}}}, ["settings/limits", "max_queue"]),
        ({"settings": {"limits": {"max_queue_s": "5 s"}}}, ["max_queue_s", "want number"]),
        ({"settings": {"parallel": {"device": "auto"}}}, ["parallel/device"]),
        ({"settings": {"model": {"path": "/models"}}}, ["settings/model", "path"]),
        ({"settings": {"server": {"probe_port": None}}}, ["probe_port"]),
        ({"worker": {"resources": {"limits": {"memory": 5}}}}, ["limits/memory", "want string"]),
        ({"worker": {"resources": {"limits": {"memory": "5 GB"}}}}, ["limits/memory"]),
        ({"autoscaling": {"kind": "vpa"}}, ["autoscaling/kind"]),
        ({"image": {"worker": {"digest": "sha256:abc"}}}, ["worker/digest"]),
        ({"preStopSleepSeconds": 0}, ["preStopSleepSeconds"]),
        ({"apiKeys": {"keys": ["a key"]}}, ["apiKeys/keys"]),
        ({"apiKeys": {"keys": ["k"], "existingSecret": "s"}}, ["keys or existingSecret, not both"]),
        ({"rollout": {"maxSurge": "0%", "maxUnavailable": 0}}, ["no pod could ever be replaced"]),
        ({"model": {"volume": {"emptyDir": {}, "nfs": {}}}}, ["model/volume"]),
    ],
    ids=str,
)
def test_helm_refuses(values: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
    command = [tool("helm"), "template", "tpvision", str(CHART), "--values", str(tmp_path / "values.yaml")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode != 0
    assert [word for word in words if word not in ended.stderr] == [], ended.stderr
