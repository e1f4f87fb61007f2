"""Tables of a page that the code makes: between `<!-- NAME: checked by TEST -->` and `<!-- end of NAME -->`."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path


def split_at_table(text: str, name: str) -> tuple[str, str, str]:
    """What stands before, in and after a table."""
    found = re.fullmatch(rf"(.*<!-- {name}: checked by [\w/.]+ -->\n)(.*)(<!-- end of {name} -->.*)", text, re.DOTALL)
    assert found, f"the page has no table {name}"
    before, table, after = found.groups()
    return before, table, after


def write_tables(page: Path, tables: Mapping[str, Callable[[], str]]) -> None:
    """Put what the code makes into the page."""
    for name, make in tables.items():
        before, _, after = split_at_table(page.read_text(), name)
        page.write_text(before + make() + after)
