"""Strict check of custom resources: the faults of each one in the YAML on standard input, by its operator's own schema.

Run by the tools' Python, which has the schemas as packages. An unknown key is an error, as it is for an API server that
validates strictly.
"""

import json
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


def faults_of(resource: Any) -> list[str]:
    schema = strict(KINDS[resource["kind"]].model_json_schema(by_alias=True))
    faults = jsonschema.Draft202012Validator(schema).iter_errors(resource)
    return [f"{fault.json_path}: {fault.message}" for fault in faults]


if __name__ == "__main__":
    print(json.dumps([faults_of(resource) for resource in yaml.safe_load_all(sys.stdin)]))
