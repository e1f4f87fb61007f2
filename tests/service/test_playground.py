"""The playground's files over HTTP: headers, caching, and the switch that takes them away."""

import tomllib

import pytest
from fastapi.testclient import TestClient
from running import GOLDEN, ROOT, RunningService, Scrape

from service.app import create_app
from service.engine import Engine
from service.reporter import Reporter
from tp.settings import Settings
from tp.spec import read_spec

FOLDER = ROOT / "service" / "assets" / "playground"
PATHS = ["/", *(f"/playground/{path.name}" for path in FOLDER.iterdir()), "/playground/photograph.jpg"]


@pytest.mark.parametrize("path", PATHS)
def test_a_file_may_load_nothing_from_elsewhere(tiny_k3: RunningService, path: str) -> None:
    answer = tiny_k3.client.get(path)
    assert answer.status_code == 200
    assert answer.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'; ")
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert b"://" not in answer.content.replace(b"http://www.w3.org/2000/svg", b"") or path.endswith(".jpg")


@pytest.mark.parametrize("path", PATHS)
def test_a_file_is_sent_once(tiny_k3: RunningService, path: str) -> None:
    answer = tiny_k3.client.get(path)
    assert answer.headers["cache-control"] == "no-cache"
    etag = answer.headers["etag"]
    for sent in (etag, f'"other", W/{etag}'):
        again = tiny_k3.client.get(path, headers={"if-none-match": sent})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
    assert tiny_k3.client.get(path, headers={"if-none-match": '"other"'}).status_code == 200


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_head_has_the_headers_of_get(tiny_k3: RunningService, path: str) -> None:
    head, get = tiny_k3.client.head(path), tiny_k3.client.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == get.headers["content-length"]


@pytest.mark.parametrize("name", ["index.htm", "..%2fphotograph.jpg", "%2e%2e/%2e%2e/app.py", ""])
def test_there_are_no_other_files(tiny_k3: RunningService, name: str) -> None:
    answer = tiny_k3.client.get(f"/playground/{name}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


def test_its_routes_are_two_and_not_the_apis(tiny_k3: RunningService) -> None:
    assert not [path for path in tiny_k3.client.get("/openapi.json").json()["paths"] if path in PATHS]
    before = tiny_k3.scrape()
    for path in PATHS:
        tiny_k3.client.get(path)
    after = tiny_k3.scrape()
    added = {route: requests(after, route) - requests(before, route) for route in ("/", "/playground/{name}", "other")}
    assert added == {"/": 1, "/playground/{name}": len(PATHS) - 1, "other": 0}
    assert after.value("accepted_total") == before.value("accepted_total")


def requests(scrape: Scrape, route: str) -> float:
    return scrape.value("requests_total", route=route)


@pytest.mark.parametrize(("playground", "status"), [("on", 200), ("off", 404)])
def test_it_can_be_switched_off(playground: str, status: int) -> None:
    folder = GOLDEN / "tiny-k3-f32"
    settings = Settings.model_validate({"model": {"path": folder}, "server": {"playground": playground}})
    engine = Engine(settings, read_spec(folder))
    with TestClient(create_app(settings, engine, Reporter(engine.metrics, None))) as client:
        assert {path: client.get(path).status_code for path in PATHS} == dict.fromkeys(PATHS, status)


def test_every_asset_is_in_the_package() -> None:
    globs = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["service"]
    packaged = {path for glob in globs for path in (ROOT / "service").glob(glob) if path.is_file()}
    assert packaged == {path for path in (ROOT / "service" / "assets").rglob("*") if path.is_file()}
