"""The playground: one page at `/` and its files below `/playground/`, for people with a browser and a picture.

They need no key; what the page calls in /v1/* does, as from anybody else.
"""

from pathlib import Path

from fastapi import FastAPI

from service.static_page import add_static_page

_ASSETS = Path(__file__).parent / "assets"


def add_playground(app: FastAPI) -> None:
    """Let `app` serve the page and its files."""
    files = [*(_ASSETS / "playground").iterdir(), _ASSETS / "photograph.jpg"]
    add_static_page(app, "/", _ASSETS / "playground" / "index.html", files, folder="/playground")
