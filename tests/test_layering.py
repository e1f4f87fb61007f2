"""Proves the README's picture of the modules: who may import whom, and that the front-end runs without torch."""

import ast
import importlib.util
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CONTRACT = {
    "tp.spec",
    "tp.modes",
    "tp.wire",
    "tp.slab",
    "tp.settings",
    "tp.memory",
    "tp.process",
    "tp.checkpoint",
    "tp.bench.messages",
}
WORKER_ONLY = {"torch", "safetensors.torch"}


def paths(package: str) -> list[Path]:
    return [path for path in sorted((ROOT / package).rglob("*.py")) if path.name != "__init__.py"]


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


MODULES = {name_of(path): path for package in ("service", "tp") for path in paths(package)}
SERVICE = sorted(name for name in MODULES if name.startswith("service."))
WORKER = sorted(name for name in MODULES if name.startswith("tp."))


def imports(path: Path) -> set[str]:
    """Every module that the file imports, anywhere in it; `from tp import wire` counts as tp.wire."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            assert node.module is not None
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (inner & MODULES.keys()) or {node.module}
    return found


def ours(name: str) -> set[str]:
    return imports(MODULES[name]) & MODULES.keys()


def needs_torch(name: str) -> bool:
    return any(found.split(".")[0] == "torch" or found in WORKER_ONLY for found in imports(MODULES[name]))


def reached(names: set[str]) -> set[str]:
    """`names` and all of our modules that they import, directly or not."""
    seen: set[str] = set()
    waiting = set(names)
    while waiting:
        name = waiting.pop()
        seen.add(name)
        waiting |= ours(name) - seen
    return seen


@pytest.mark.parametrize("name", SERVICE)
def test_service_imports_only_the_contract_from_tp(name: str) -> None:
    assert {found for found in imports(MODULES[name]) if found.split(".")[0] == "tp"} <= CONTRACT


@pytest.mark.parametrize("name", WORKER)
def test_tp_never_imports_service(name: str) -> None:
    assert {found for found in imports(MODULES[name]) if found.split(".")[0] == "service"} == set()


@pytest.mark.parametrize("name", sorted(MODULES))
def test_nothing_imports_tests(name: str) -> None:
    assert {found.split(".")[0] for found in imports(MODULES[name])} & {"tests", "pytest", "hypothesis"} == set()


def test_no_module_of_the_front_end_or_the_contract_reaches_torch() -> None:
    """But for two methods of the client's `Embedding`, for its callers; importing the client loads none (below)."""
    assert [name for name in sorted(reached({*SERVICE, *CONTRACT})) if needs_torch(name)] == ["service.client"]


def test_contract_uses_the_standard_library_and_four_packages() -> None:
    allowed = {*sys.stdlib_module_names, "numpy", "pydantic", "safetensors", "yaml", "tp"}
    outside = {found for name in reached(CONTRACT) for found in imports(MODULES[name])}
    assert {found for found in outside if found.split(".")[0] not in allowed} == set()


def test_there_are_no_cycles() -> None:
    try:
        TopologicalSorter({name: ours(name) for name in MODULES}).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_importing_the_app_the_command_and_the_client_loads_no_torch() -> None:
    code = (
        "import service.app, service.cli, service.client, sys; print([name for name in sys.modules if name == 'torch'])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert run.stderr == ""
    assert run.stdout.strip() == "[]"


def test_the_command_starts_without_the_libraries_of_extras() -> None:
    extras = "('huggingface_hub', 'pyarrow', 'zmq')"
    code = f"import service.cli, sys; print([name for name in sys.modules if name.split('.')[0] in {extras}])"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (run.stdout.strip(), run.stderr) == ("[]", "")


@pytest.mark.parametrize("package", ["service", "tp"])
def test_init_files_are_empty(package: str) -> None:
    assert {path.stat().st_size for path in (ROOT / package).rglob("__init__.py")} == {0}


@pytest.mark.parametrize("name", sorted(MODULES))
def test_every_module_says_what_it_does(name: str) -> None:
    docstring = ast.get_docstring(ast.parse(MODULES[name].read_bytes()))
    assert docstring
    assert docstring.splitlines()[0].endswith((".", ":", "`", "?"))


@pytest.mark.parametrize("name", sorted(MODULES))
def test_no_module_is_called_after_nothing(name: str) -> None:
    assert re.split(r"[._]", name)[-1] not in {"utils", "util", "common", "helpers", "manager", "misc"}


def test_readme_lists_every_module_once_in_the_order_of_paths() -> None:
    listed = re.findall(r"^\| `((?:service|tp)/\S+\.py)` \| ", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert listed == sorted(path.relative_to(ROOT).as_posix() for path in MODULES.values())


def test_modules_are_found_where_they_are_run_from() -> None:
    spec = importlib.util.find_spec("service.errors")
    assert spec is not None
    assert spec.origin == str(ROOT / "service" / "errors.py")
