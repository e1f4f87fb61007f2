"""The page at /docs: everything it names is served here, and nobody else is named."""

import re
from collections.abc import Iterator
from urllib.parse import urljoin, urlsplit

import httpx
import pytest
from running import RunningService
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from service.app import create_routes, set_keys
from tp.settings import HandoffSettings

Browser = httpx.Client | TestClient


@pytest.fixture(params=["/", "/vision/"])
def browser(request: pytest.FixtureRequest, tiny_k3: RunningService) -> Iterator[tuple[Browser, str]]:
    """A client, and the folder that it finds the service in."""
    if request.param == "/":
        yield tiny_k3.client, request.param
        return
    routes = create_routes(HandoffSettings())
    set_keys(routes, None)
    with TestClient(Starlette(routes=[Mount("/vision", routes)])) as client:
        yield client, request.param


def named_by(page: str) -> set[str]:
    """Every URL that the page loads or links to."""
    return set(re.findall(r'(?:src|href)="([^"]+)"', page))


def test_all_that_the_page_names_is_served_here(browser: tuple[Browser, str]) -> None:
    client, folder = browser
    page = client.get(f"{folder}docs")
    assert page.headers["content-type"].startswith("text/html")
    script = client.get(f"{folder}docs/docs.js").text
    named = named_by(page.text) - {"data:,"} | set(re.findall(r'\burl: "([^"]+)"', script))
    assert named == {"docs/swagger-ui.css", "docs/swagger-ui-bundle.js", "docs/docs.js", "openapi.json"}
    for name in named:
        answer = client.get(urljoin(f"{folder}docs", name))
        assert answer.status_code == 200, name
        kind = {"css": "css", "js": "javascript", "json": "json"}[name.rpartition(".")[2]]
        assert kind in answer.headers["content-type"]


def test_no_other_host_is_named_or_may_be_asked(browser: tuple[Browser, str]) -> None:
    client, folder = browser
    for name in ("docs", "docs/docs.js"):
        answer = client.get(folder + name)
        assert not re.search(r"""[\w]+://|["'(]//""", answer.text)
        policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
        assert policy.pop("default-src") == "'none'"
        assert policy["script-src"] == policy["connect-src"] == "'self'"
        assert {source for part in policy.values() for source in part.split()} == {"'self'", "'none'", "data:"}


def test_what_the_page_sends_goes_to_the_service_that_it_came_from(browser: tuple[Browser, str]) -> None:
    client, folder = browser
    where = f"http://host{folder}openapi.json"
    (server,) = client.get(f"{folder}openapi.json").json()["servers"]
    assert urljoin(where, server["url"]) == f"http://host{folder}"
    assert urlsplit(server["url"]).netloc == ""


@pytest.mark.parametrize("name", ["redoc.standalone.js", "favicon.png", "..%2fapp.py", "docs.html"])
def test_nothing_else_of_the_folders_is_served(tiny_k3: RunningService, name: str) -> None:
    answer = tiny_k3.client.get(f"/docs/{name}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
