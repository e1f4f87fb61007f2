"""deploy/ as the tests see it: the chart rendered with a values file, as text or as Kubernetes objects."""

import re
from pathlib import Path
from typing import Any

import yaml
from tools import ROOT, run, tool

DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "chart" / "tpvision"
VALUES = DEPLOY / "values"
MANIFESTS = DEPLOY / "manifests"
NAMES = sorted(path.stem for path in VALUES.glob("*.yaml"))
EVERYTHING = sorted((Path(__file__).parent / "values").glob("*.yaml"))  # with every option of the chart between them

Object = dict[str, Any]


def helm_template(*values: Path, chart: Path = CHART, release: str = "tpvision") -> str:
    """What `helm template` prints for a release in the namespace tpvision; later values win."""
    files = [word for path in values for word in ("--values", path)]
    printed = run(tool("helm"), "template", release, chart, "--namespace", "tpvision", *files)
    return "\n".join(line for line in printed.splitlines() if not line.startswith("level=INFO ")) + "\n"


def anchors(path: Path) -> set[str]:
    """Where links into a Markdown file may lead."""
    titles = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


class _Loader(yaml.SafeLoader):
    """Refuses keys that are given twice, of which YAML's loader takes the last in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]  # type: ignore[no-untyped-call]
        assert len(set(keys)) == len(keys), f"a key twice: {sorted(keys)}"
        return super().construct_mapping(node, deep)


class Rendered:
    """Kubernetes objects, found by kind and name."""

    def __init__(self, text: str) -> None:
        self.objects: list[Object] = [document for document in yaml.load_all(text, _Loader) if document]

    def all(self, kind: str) -> list[Object]:
        return [found for found in self.objects if found["kind"] == kind]

    def one(self, kind: str, name: str | None = None) -> Object:
        (found,) = (each for each in self.all(kind) if name in (None, each["metadata"]["name"]))
        return found

    @property
    def pod(self) -> Object:
        """The pod template of the Deployment."""
        return self.one("Deployment")["spec"]["template"]  # type: ignore[no-any-return]

    @property
    def frontend(self) -> Object:
        (found,) = self.pod["spec"]["containers"]
        return found  # type: ignore[no-any-return]

    @property
    def workers(self) -> list[Object]:
        return [each for each in self.pod["spec"]["initContainers"] if each["name"].startswith("worker-")]
