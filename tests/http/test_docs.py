"""What docs/api.md counts is made from the tables, and every path it names is there."""

import re
from pathlib import Path

import pytest
from toy_door import toy_served

from triptych.core.config import Config
from triptych.http import status
from triptych.http.app import build_app
from triptych.http.front import Front
from triptych.metrics import names
from triptych.testing.toy_engine import ToyEngine
from triptych.testing.toy_prompts import ToyMedia

PAGE = Path(__file__).parents[2] / "docs" / "api.md"


@pytest.mark.parametrize(("part", "table"), [("errors", status.as_markdown), ("metrics", names.as_markdown)])
def test_table_of_the_docs_is_current(part, table):
    """The tables are the code's own; `python tests/http/test_docs.py` writes them."""
    found = re.search(rf"<!-- {part}: .*? -->\n(.*?)<!-- end -->", PAGE.read_text(), re.DOTALL)

    assert found[1].strip() == table()


def test_every_path_of_the_docs_is_served():
    """A path in the first table answers something else than 404."""
    app = build_app(Front(Config(), [toy_served(ToyEngine())], ToyMedia()))
    routes = {route.path for route in app.routes}
    first_table = PAGE.read_text().split("## ")[0]
    named = set(re.findall(r"(?:`|GET |POST )(/[a-z0-9_/{}]*)`", first_table))

    assert len(named) > 12
    assert named <= routes


def write() -> None:
    text = PAGE.read_text()
    for part, table in (("errors", status.as_markdown), ("metrics", names.as_markdown)):
        text = re.sub(
            rf"(<!-- {part}: .*? -->\n).*?(<!-- end -->)",
            lambda found, table=table: f"{found[1]}{table()}\n{found[2]}",
            text,
            flags=re.DOTALL,
        )
    PAGE.write_text(text)


if __name__ == "__main__":
    write()
