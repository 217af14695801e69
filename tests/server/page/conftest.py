"""One browser and one server for all tests of the page, and a tab for each test.

Both last for this package alone: the server's engine thread would otherwise run beside later tests of memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.support.browser import HOW_TO_GET, Browser, Page, browsing, find_browser
from tests.support.models import tiny_loaded
from tests.support.servers import Served, emptied, running

LOADED = "!document.getElementById('main').hidden"
IS_ASKED = "document.getElementById('confirm').open"


def shown(text: str) -> str:
    """A condition: the page contains this text."""
    return f"document.body.innerText.replaceAll('\\u00a0', ' ').includes({json.dumps(text)})"


@pytest.fixture(scope="package")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find_browser()
    if program is None:
        pytest.skip(HOW_TO_GET)
    with browsing(program, tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="package")
def page_server() -> Iterator[Served]:
    """A server whose history has slots of one second."""
    with running(tiny_loaded("llama"), slot_s=1.0) as served:
        yield served


@pytest.fixture
def fresh(page_server: Served) -> Served:
    """The server of the page with an empty cache."""
    return emptied(page_server)


@pytest.fixture
def tab(browser: Browser) -> Iterator[Page]:
    """An empty tab; the test fails if a page in it logs an error or a warning."""
    tab = browser.page()
    yield tab
    assert tab.complaints == []
    tab.close()


@pytest.fixture
def page(tab: Page, fresh: Served) -> Page:
    """The page of a server with an empty cache."""
    tab.open(fresh.url)
    tab.wait(LOADED)
    return tab
