"""The installed version of this package, for answers that tell it."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def installed_version() -> str:
    """Of this package; an installation without metadata, as a plain checkout, has none."""
    try:
        return version("tpvision")
    except PackageNotFoundError:
        return "not installed"
