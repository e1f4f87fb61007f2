"""What is made from something else and kept in the repository: the chart's schema of `settings`, and plain manifests.

`PYTHONPATH=.:tests:tests/operations python tests/operations/derived.py` writes both; tests check that they are current.
"""

import json
from typing import Any

from chart import CHART, MANIFESTS, VALUES, helm_template

from tp.settings import Settings

SCHEMA = CHART / "values.schema.json"
_CHOSEN_BY_THE_CHART = {
    "ModelSettings": ("path",),
    "ParallelSettings": ("workers", "socket"),
    "ServerSettings": ("api_keys_file",),
}
# The chart counts GPUs, ports and containers by these.
_REQUIRED = {"Settings": ("parallel", "server"), "ParallelSettings": ("tensor", "groups", "device")}
_REQUIRED |= {"ServerSettings": ("port", "probe_port")}


def values_schema() -> str:
    """The chart's schema with our settings model for `settings`, less what the chart decides itself."""
    schema = json.loads(SCHEMA.read_text())
    ours = {name: part for name, part in schema["$defs"].items() if not name.endswith("Settings")}
    return json.dumps({**schema, "$defs": {**ours, **settings_schema()}}, indent=2, ensure_ascii=False) + "\n"


def settings_schema() -> dict[str, Any]:
    """`$defs` of the settings model."""
    whole = Settings.model_json_schema()
    parts: dict[str, Any] = whole.pop("$defs")
    parts["Settings"] = whole
    for name, keys in _CHOSEN_BY_THE_CHART.items():
        for key in keys:
            del parts[name]["properties"][key]
    for name, keys in _REQUIRED.items():
        parts[name]["required"] = list(keys)
    parts["ParallelSettings"]["properties"]["device"]["enum"].remove("auto")
    parts["ServerSettings"]["properties"]["port"]["minimum"] = 1
    parts["ServerSettings"]["properties"]["probe_port"] = {
        **parts["ServerSettings"]["properties"]["port"],
        "description": parts["ServerSettings"]["properties"]["probe_port"]["description"],
    }
    return {name: _without_defaults(part) for name, part in sorted(parts.items())}


def manifest(name: str) -> str:
    """The chart rendered with a values file, for people without Helm."""
    return (
        f"# deploy/values/{name}.yaml, rendered by Helm. Made by tests/operations/derived.py; edit the values.\n"
        + helm_template(VALUES / f"{name}.yaml")
    )


def _without_defaults(part: Any) -> Any:
    """The chart's defaults are in values.yaml, the others in the settings model; titles repeat the names."""
    if isinstance(part, dict):
        return {
            key: _without_defaults(value)
            for key, value in part.items()
            if not (key in ("default", "title") and not isinstance(value, dict))
        }
    return [_without_defaults(value) for value in part] if isinstance(part, list) else part


if __name__ == "__main__":
    SCHEMA.write_text(values_schema())
    for path in VALUES.glob("*.yaml"):
        (MANIFESTS / path.name).write_text(manifest(path.stem))
