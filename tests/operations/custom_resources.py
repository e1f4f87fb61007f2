"""Strict check of custom resources: the YAML on standard input against their operators' own schemas.

Run by the tools' Python, which has the schemas as packages. An unknown key is an error, as it is for an API server that
validates strictly.
"""

import sys
from typing import Any

import jsonschema
import yaml
from cloudcoil.models.keda.v1alpha1 import ScaledObject
from cloudcoil.models.prometheus_operator.v1 import PrometheusRule, ServiceMonitor

KINDS = {model.__name__: model for model in (PrometheusRule, ScaledObject, ServiceMonitor)}


def strict(schema: Any) -> Any:
    """The schema with no room for keys that it does not name."""
    if isinstance(schema, dict):
        inner = {key: strict(value) for key, value in schema.items()}
        return {"additionalProperties": False, **inner} if "properties" in schema else inner
    return [strict(each) for each in schema] if isinstance(schema, list) else schema


def main() -> int:
    """The number of objects with faults."""
    num_faulty = 0
    for each in yaml.safe_load_all(sys.stdin):
        schema = strict(KINDS[each["kind"]].model_json_schema(by_alias=True))
        faults = list(jsonschema.Draft202012Validator(schema).iter_errors(each))
        num_faulty += bool(faults)
        for fault in faults:
            print(f"{each['kind']} {fault.json_path}: {fault.message}")
        print(f"{each['kind']}: {len(faults)} faults")
    return num_faulty


if __name__ == "__main__":
    sys.exit(main())
