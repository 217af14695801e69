"""Conversations on the page, in a real browser: their bars, and the actions that need confirmation."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.page.conftest import IS_ASKED, shown
from tests.server.test_cache import LONG, complete, get, post, settle
from tests.support.browser import Page
from tests.support.servers import Served

FIRST, SECOND = [*LONG, 7, 8], [*LONG[:250], 3, 4, 5, 6]


def hot_tokens(served: Served) -> int:
    return get(served, "/cache/usage")["tiers"]["hot"]["tokens"]


def row_of(session: str) -> str:
    """A selector of a conversation's row."""
    return f'.conversation:has(.id[title="{session}"])'


def two_conversations(served: Served, tab: Page) -> list[dict[str, Any]]:
    complete(served, FIRST, prompt_cache_key="first")
    complete(served, SECOND, prompt_cache_key="second")
    settle(served)
    tab.open(served.url)
    tab.wait("document.querySelectorAll('.conversation').length === 2")
    return get(served, "/cache/conversations")["conversations"]


def test_shared_prefix_is_drawn_once(tab: Page, fresh: Served) -> None:
    first, second = two_conversations(fresh, tab)
    drawn = tab.run(
        """[...document.querySelectorAll('.conversation')].map(it => ({
          id: it.dataset.conversation, name: it.querySelector('.id').innerText,
          left: it.querySelector('.segment').style.left, said: it.querySelector('.track').ariaLabel}))"""
    )
    assert [row["name"] for row in drawn] == ["first", "second"]
    assert [row["id"] for row in drawn] == [first["id"], second["id"]]
    assert drawn[0]["left"] == "0%"
    assert float(drawn[1]["left"].rstrip("%")) == pytest.approx(100 * 250 / first["tokens"], abs=0.01)
    assert drawn[1]["said"].startswith("shares its first 250 tokens with the one above; 5 tokens, raw, in memory")
    assert tab.run("document.querySelectorAll('#branches path').length") == 1
    post(fresh, "/cache/requantize", k="planes:8", v="planes:4")
    tab.wait("document.querySelector('.segment i').style.background === 'var(--b8)'")
    assert tab.run("[...document.querySelectorAll('.segment i')].map(it => it.style.background)") == [
        "var(--b8)", "var(--b4)", "var(--b8)", "var(--b4)",
    ]  # fmt: skip
    assert "keys above, values below" in tab.text("#conversations-keys")


def test_drop_needs_confirmation(tab: Page, fresh: Served) -> None:
    _, second = two_conversations(fresh, tab)
    before = hot_tokens(fresh)
    button = f'{row_of("second")} [data-action="drop"]'
    for leave in ("#confirm [value=no]", None):
        tab.click(button)
        tab.wait(IS_ASKED)
        assert "5 tokens (" in tab.text("#confirm-cost")
        assert "in memory that no other conversation has." in tab.text("#confirm-cost")
        # Enter cancels.
        assert tab.run("document.activeElement.value") == "no"
        tab.click(leave) if leave else tab.press("Escape")
        tab.wait(f"!{IS_ASKED}")
        assert hot_tokens(fresh) == before
    tab.click(button)
    tab.wait(IS_ASKED)
    tab.click("#confirm-yes")
    tab.wait("document.querySelectorAll('.conversation').length === 1")
    assert before - hot_tokens(fresh) == second["tokens"] - 250
    assert "freed" in tab.text("#conversations-message")


def test_clear_needs_confirmation(tab: Page, fresh: Served) -> None:
    two_conversations(fresh, tab)
    before = hot_tokens(fresh)
    tab.click("#clear")
    tab.wait(IS_ASKED)
    assert f"{before} tokens (" in tab.text("#confirm-cost")
    tab.press("Enter")
    tab.wait(f"!{IS_ASKED}")
    assert hot_tokens(fresh) == before
    tab.click("#clear")
    tab.wait(IS_ASKED)
    tab.click("#confirm-yes")
    tab.wait(shown("Nothing is cached yet."))
    assert hot_tokens(fresh) == 0


def test_pin_and_unpin(tab: Page, fresh: Served) -> None:
    two_conversations(fresh, tab)
    tab.click(f'{row_of("second")} [data-action="pin"]')
    tab.wait(f"""document.querySelector('{row_of("second")} [data-action="unpin"]')""")
    assert get(fresh, "/cache/usage")["pinned_bytes"] > 0
    tab.click(f'{row_of("second")} [data-action="drop"]')
    tab.wait(shown("It is pinned. Unpin it first."))
    assert tab.run(IS_ASKED) is False
    tab.click(f'{row_of("second")} [data-action="unpin"]')
    tab.wait(f"""document.querySelector('{row_of("second")} [data-action="pin"]')""")
    assert get(fresh, "/cache/usage")["pinned_bytes"] == 0


@pytest.mark.parametrize("width", [390, 1280])
def test_rows_and_dialog_fit_the_window_and_have_names(tab: Page, fresh: Served, width: int) -> None:
    complete(fresh, FIRST, prompt_cache_key="x" * 80)
    complete(fresh, SECOND, prompt_cache_key="second")
    tab.open(fresh.url, width=width, height=844)
    tab.wait("document.querySelectorAll('.conversation').length === 2")
    tab.wait("document.querySelector('tr.request')")
    tab.click("tr.request button")
    tab.wait("document.querySelector('.details:not([hidden]) .now')")
    assert tab.run("document.documentElement.scrollWidth") == width
    tab.click('[data-action="drop"]')
    tab.wait(IS_ASKED)
    assert tab.run("document.getElementById('confirm').getBoundingClientRect().right") <= width
    unnamed = tab.run(
        """[...document.querySelectorAll('button, [role=img], dialog[open]')].filter(it => !it.closest('[hidden]'))
          .filter(it => !(it.innerText?.trim() || it.ariaLabel || it.getAttribute('aria-labelledby')))
          .map(it => it.outerHTML)"""
    )
    assert unnamed == []
    tab.press("Escape")
