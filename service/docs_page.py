"""The page at /docs: Swagger UI over /openapi.json.

Swagger UI's own files are those that the package fastapi-offline ships; nothing else of it is used.
"""

from importlib.resources import files
from pathlib import Path

from fastapi import FastAPI

from service.static_page import add_static_page

_ASSETS = Path(__file__).parent / "assets"
_SWAGGER_UI = Path(str(files("fastapi_offline"))) / "static"
_FILES = (_ASSETS / "docs.js", _SWAGGER_UI / "swagger-ui.css", _SWAGGER_UI / "swagger-ui-bundle.js")


def add_docs_page(app: FastAPI) -> None:
    """Add /docs and the files that it names; its icons are data URIs."""
    add_static_page(app, "/docs", _ASSETS / "docs.html", _FILES, folder="/docs", images="'self' data:")
