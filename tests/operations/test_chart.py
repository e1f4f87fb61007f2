"""The chart as Helm sees it: it lints, renders and packs with every values file, and refuses what it does not know."""

import json
import subprocess
from collections.abc import Iterator
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


def test_values_stay_the_strings_that_they_are(tmp_path: Path) -> None:
    values = {
        "model": {
            "claim": "123",
            "fetch": {
                "enabled": True,
                "revision": "a: b",
                "endpoint": "- c",
                "tokenSecret": {"name": "0x1", "key": "1e3"},
                "cacheSize": "4000000000",
            },
        },
        "image": {"frontend": {"repository": "&d", "tag": "1"}},
        "worker": {"shmSize": "1000000000"},
        "apiKeys": {"existingSecret": "456"},
        "ingress": {
            "enabled": True,
            "className": "null",
            "host": "*.example.org",
            "paths": ["/a: b"],
            "tlsSecret": "789",
        },
        "autoscaling": {"kind": "keda", "prometheusAddress": "e #f"},
        "monitoring": {"serviceMonitor": True, "labels": {"release": "yes"}},
        "podAnnotations": {"team": "1_0"},
        "podLabels": {"cost": "0.5"},
        "priorityClassName": "true",
        "runtimeClassName": "~",
    }
    release = "12"
    found = set(strings(Rendered(rendered_with(values, tmp_path, release=release)).objects))
    given = set(strings(values)) - {"keda", "a: b", "&d", "1"} | {"--revision=a: b", "&d:1", release}
    assert given <= found


def test_what_the_user_gives_wins_over_the_charts_own(tmp_path: Path) -> None:
    """Rendered refuses a key that is there twice."""
    values = {
        "podAnnotations": {"kubectl.kubernetes.io/default-container": "worker-0"},
        "monitoring": {"labels": {"app.kubernetes.io/managed-by": "us"}},
        "ingress": {"annotations": {"nginx.ingress.kubernetes.io/proxy-body-size": "1m"}},
    }
    rendered = Rendered(rendered_with(values, tmp_path, EVERYTHING[1]))
    monitors = [rendered.one(kind)["metadata"]["labels"] for kind in ("ServiceMonitor", "PrometheusRule")]
    annotations = [rendered.pod["metadata"]["annotations"], rendered.one("Ingress")["metadata"]["annotations"]]
    assert values["podAnnotations"].items() <= annotations[0].items()
    assert values["ingress"]["annotations"].items() <= annotations[1].items()
    assert all(values["monitoring"]["labels"].items() <= labels.items() for labels in monitors)
    assert "checksum/settings" in annotations[0] and "helm.sh/chart" in monitors[0]


def test_a_rule_for_what_may_go_out_comes_with_one_for_names(tmp_path: Path) -> None:
    rule = {"to": [{"podSelector": {}}], "ports": [{"port": 4318}]}
    text = rendered_with({"networkPolicy": {"egress": [rule]}}, tmp_path)
    names, given = Rendered(text).one("NetworkPolicy")["spec"]["egress"]
    assert ({port["port"] for port in names["ports"]}, given) == ({53}, rule)


@pytest.mark.parametrize("keys", [[], ["a-key"]])
def test_the_notes_send_a_key_where_one_is_asked_for(keys: list[str], tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text(yaml.safe_dump({"apiKeys": {"keys": keys}}))
    command = [tool("helm"), "install", "tpvision", CHART, "--dry-run=client", "--values", tmp_path / "values.yaml"]
    notes = run(*command).partition("NOTES:")[2]
    (curl,) = (line for line in notes.splitlines() if "curl" in line)
    assert curl.endswith('tokens.safetensors -H "Authorization: Bearer $KEY"' if keys else "tokens.safetensors")
    assert ("NO KEYS" in notes) == (not keys)


def rendered_with(values: dict[str, Any], folder: Path, *files: Path, release: str = "tpvision") -> str:
    (folder / "values.yaml").write_text(json.dumps(values))  # PyYAML leaves "1e3" bare, a number to Helm
    return helm_template(*files, folder / "values.yaml", release=release)


def strings(part: Any) -> Iterator[str]:
    """Every string in it that is no key."""
    if isinstance(part, str):
        yield part
    elif isinstance(part, dict | list):
        for each in part.values() if isinstance(part, dict) else part:
            yield from strings(each)


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
        ({"model": {"fetch": {"enabled": True}, "demo": {"enabled": True}}}, ["fetch and demo"]),
        ({"settings": {"server": {"probe_port": 8000}}}, ["port and probe_port are the same"]),
        ({"settings": {"server": {"host": "127.0.0.1"}}}, ["server.host", "loopback"]),
        ({"autoscaling": {"kind": "hpa", "minReplicas": 5}}, ["minReplicas is more than maxReplicas"]),
        ({"autoscaling": {"kind": "keda"}}, ["set monitoring.serviceMonitor"]),
        ({"podLabels": {"app.kubernetes.io/name": "ours"}}, ["podLabels", "app.kubernetes.io/name"]),
    ],
    ids=str,
)
def test_helm_refuses(values: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
    command = [tool("helm"), "template", "tpvision", str(CHART), "--values", str(tmp_path / "values.yaml")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode != 0
    assert [word for word in words if word not in ended.stderr] == [], ended.stderr
