"""Other people's checkers over what we deploy: Kubernetes' schemas, its operators' schemas, security policies."""

import copy
import json
import subprocess
from pathlib import Path

import pytest
import yaml
from chart import EVERYTHING, MANIFESTS, NAMES, VALUES, Rendered, helm_template
from tools import ROOT, run, tool

pytestmark = pytest.mark.operations
VERSIONS = (
    "1.30",
    "1.34",
    "1.37",
)  # the oldest that the chart allows, one with stable sidecars and sleep, the newest
CUSTOM = ("PrometheusRule", "ScaledObject", "ServiceMonitor")
# What checkov asks for and we decline, and why.
DECLINED = {
    "CKV_DOCKER_7": "the base image is an argument, whose default has a tag",
    "CKV_K8S_11": "no CPU limits: throttling lengthens the tail, and requests share a busy node fairly",
    "CKV_K8S_15": "images are named by version or digest, so one that is there is the right one",
    "CKV_K8S_35": "HF_TOKEN is read from the environment by the hub's library",
    "CKV_K8S_43": "the digest is the operator's to give: image.*.digest",
}


def files() -> list[Path]:
    return [*(VALUES / f"{name}.yaml" for name in NAMES), *EVERYTHING]


def split(text: str, *, custom: bool) -> str:
    """The custom resources, or all others, as YAML."""
    chosen = [each for each in Rendered(text).objects if (each["kind"] in CUSTOM) == custom]
    return yaml.safe_dump_all(chosen)


@pytest.fixture(scope="module")
def faults() -> dict[str, list[str]]:
    """What the strict schemas say of each custom resource, and of one with a misspelt key."""
    rendered = Rendered(helm_template(EVERYTHING[1]))
    resources = [rendered.one(kind) for kind in CUSTOM]
    misspelt = copy.deepcopy(rendered.one("ServiceMonitor"))
    misspelt["spec"]["endpoints"][0]["intervall"] = "15s"
    python = Path(tool("kubernetes-validate")).with_name("python")
    script = Path(__file__).with_name("custom_resources.py")
    said = run(python, script, content=yaml.safe_dump_all([*resources, misspelt]))
    return dict(zip([*CUSTOM, "misspelt"], json.loads(said), strict=True))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("values", files(), ids=lambda path: path.stem)
def test_kubernetes_validate_strict(values: Path, version: str, tmp_path: Path) -> None:
    (tmp_path / "rendered.yaml").write_text(split(helm_template(values), custom=False))
    said = run(tool("kubernetes-validate"), "--strict", "-k", version, tmp_path / "rendered.yaml")
    assert "WARN" not in said, said


def test_kubernetes_validate_strict_would_notice(tmp_path: Path) -> None:
    text = (MANIFESTS / "cpu-demo.yaml").read_text().replace("failureThreshold", "failureTreshold")
    (tmp_path / "rendered.yaml").write_text(text)
    with pytest.raises(AssertionError, match="failureTreshold"):
        run(tool("kubernetes-validate"), "--strict", "-k", VERSIONS[-1], tmp_path / "rendered.yaml")


@pytest.mark.parametrize("kind", CUSTOM)
def test_custom_resources_strict(faults: dict[str, list[str]], kind: str) -> None:
    assert faults[kind] == []


def test_custom_resources_strict_would_notice(faults: dict[str, list[str]]) -> None:
    assert "intervall" in "".join(faults["misspelt"])


def test_checkov_kubernetes(tmp_path: Path) -> None:
    for values in files():
        (tmp_path / f"{values.stem}.yaml").write_text(split(helm_template(values), custom=False))
    assert failed_checks("--framework", "kubernetes", "--directory", str(tmp_path)) == []


def test_checkov_dockerfile() -> None:
    assert failed_checks("--framework", "dockerfile", "--file", str(ROOT / "docker" / "Dockerfile")) == []


def failed_checks(*arguments: str) -> list[str]:
    command = [tool("checkov"), *arguments, "--skip-download", "--compact", "--quiet", "--output", "json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    report = json.loads(ended.stdout)
    assert report.get("summary", report)["parsing_errors"] == 0, ended.stdout
    return [
        f"{each['check_id']} {each['resource']}: {each['check_name']}"
        for each in report.get("results", {}).get("failed_checks", [])
        if each["check_id"] not in DECLINED
    ]
