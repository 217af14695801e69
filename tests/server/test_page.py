"""In a real browser: what the page shows of the past and of each conversation, and what it asks before it is lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.browser import Browser, Page
from tests.server.conftest import Served, emptied, running
from tests.server.test_cache import LONG, complete, get, post, settle
from tests.server.test_dashboard import LOADED, shown
from tests.tiny import tiny_loaded

FIRST, SECOND = [*LONG, 7, 8], [*LONG[:250], 3, 4, 5, 6]
ASKED = "document.getElementById('confirm').open"


@pytest.fixture(scope="module")
def quick() -> Iterator[Served]:
    """Its history goes by in slots of a second."""
    with running(tiny_loaded("llama"), slot_s=1.0) as one:
        yield one


@pytest.fixture
def fresh(quick: Served) -> Served:
    return emptied(quick)


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """Not opened yet."""
    one = browser.page()
    yield one
    assert one.complaints == []
    one.close()


def hot_tokens(served: Served) -> int:
    return get(served, "/cache/usage")["tiers"]["hot"]["tokens"]


def wait_noted(served: Served, precision: str) -> None:
    """Until the history has a slot in which something was held so."""
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s:
        slots = get(served, "/cache/history")["slots"]
        if any(slot["tiers"] and precision in slot["tiers"]["hot"]["by_precision"] for slot in slots[-3:]):
            return
        time.sleep(0.1)
    raise AssertionError(f"no slot has {precision}")


def row_of(session: str) -> str:
    """A selector of the conversation that is named so."""
    return f'.conversation:has(.id[title="{session}"])'


def two_conversations(served: Served, page: Page) -> list[dict[str, Any]]:
    complete(served, FIRST, prompt_cache_key="first")
    complete(served, SECOND, prompt_cache_key="second")
    settle(served)
    page.open(served.url)
    page.wait("document.querySelectorAll('.conversation').length === 2")
    return get(served, "/cache/conversations")["conversations"]


def test_a_reload_loses_nothing(page: Page, fresh: Served) -> None:
    complete(fresh, FIRST)
    complete(fresh, FIRST)
    wait_noted(fresh, "raw")
    post(fresh, "/cache/requantize", k="planes:8", v="planes:8")
    wait_noted(fresh, "planes:8")
    seen = []
    for _ in range(2):
        page.open(fresh.url)
        # All of this happened before the page was there.
        page.wait("document.querySelector('[data-plot=first-token] .dot')")
        page.wait("document.querySelector('[data-plot=rate] .area')")
        page.wait(shown("New KV is stored as K planes:8, V planes:8."))
        page.wait(shown("1 span was stored in fewer bits, planes:8: "))
        page.wait("document.querySelectorAll('#chart path.layer').length >= 2")
        seen.append(page.run("[...document.querySelectorAll('tr.request')].map(it => it.dataset.request)"))
    told = [request["id"] for request in get(fresh, "/cache/history")["requests"]]
    assert seen[0] == seen[1] == told[::-1][:12]
    # Points of the chart that are older than the page.
    assert page.run("Number(document.querySelector('#chart svg').getAttribute('aria-valuemin'))") <= -2
    page.run("document.querySelector('#chart svg').focus()")
    page.press("ArrowLeft")
    page.wait("document.querySelector('[data-plot=rate] .cursor')")


def test_the_limit_is_in_the_scale_and_how_to_plan_is_told(page: Page, fresh: Served) -> None:
    complete(fresh, FIRST)
    page.open(fresh.url)
    page.wait("document.querySelector('#chart .budget')")
    top, height = page.run(
        """(() => { const box = document.querySelector('#chart').getBoundingClientRect();
        return [document.querySelector('#chart .budget').getBoundingClientRect().top - box.top, box.height] })()"""
    )
    assert 0 < top < height
    # Far beyond what is held: the axis says that it is interrupted.
    assert page.run("document.querySelectorAll('#chart .crack').length") == 1
    assert f"kvstrata plan {fresh.name}" in page.text("#limit")
    assert page.run("document.querySelector('#chart .limit').textContent").startswith("limit ")


def test_two_conversations_share_what_they_have_in_common(page: Page, fresh: Served) -> None:
    first, second = two_conversations(fresh, page)
    drawn = page.run(
        """[...document.querySelectorAll('.conversation')].map(it => ({
          id: it.dataset.conversation, name: it.querySelector('.id').innerText,
          left: it.querySelector('.stratum').style.left, said: it.querySelector('.track').ariaLabel}))"""
    )
    assert [row["name"] for row in drawn] == ["first", "second"]
    assert [row["id"] for row in drawn] == [first["id"], second["id"]]
    assert drawn[0]["left"] == "0%"
    assert float(drawn[1]["left"].rstrip("%")) == pytest.approx(100 * 250 / first["tokens"], abs=0.01)
    assert drawn[1]["said"].startswith("shares its first 250 tokens with the one above; 5 tokens, raw, in memory")
    assert page.run("document.querySelectorAll('#joints path').length") == 1
    post(fresh, "/cache/requantize", k="planes:8", v="planes:4")
    page.wait("document.querySelector('.stratum i').style.background === 'var(--b8)'")
    assert page.run("[...document.querySelectorAll('.stratum i')].map(it => it.style.background)") == [
        "var(--b8)", "var(--b4)", "var(--b8)", "var(--b4)",
    ]  # fmt: skip
    assert "keys above, values below" in page.text("#conversations-keys")


def test_dropping_is_asked_for_and_cancel_drops_nothing(page: Page, fresh: Served) -> None:
    _, second = two_conversations(fresh, page)
    before = hot_tokens(fresh)
    button = f'{row_of("second")} [data-act="drop"]'
    for leave in ("#confirm [value=no]", None):
        page.click(button)
        page.wait(ASKED)
        assert "5 tokens (" in page.text("#confirm-cost")
        assert "in memory that no other conversation has." in page.text("#confirm-cost")
        # A user who only presses Enter loses nothing.
        assert page.run("document.activeElement.value") == "no"
        page.click(leave) if leave else page.press("Escape")
        page.wait(f"!{ASKED}")
        assert hot_tokens(fresh) == before
    page.click(button)
    page.wait(ASKED)
    page.click("#confirm-yes")
    page.wait("document.querySelectorAll('.conversation').length === 1")
    assert before - hot_tokens(fresh) == second["tokens"] - 250
    assert "freed" in page.text("#conversations-said")


def test_clearing_is_asked_for(page: Page, fresh: Served) -> None:
    two_conversations(fresh, page)
    before = hot_tokens(fresh)
    page.click("#clear")
    page.wait(ASKED)
    assert f"{before} tokens (" in page.text("#confirm-cost")
    page.press("Enter")
    page.wait(f"!{ASKED}")
    assert hot_tokens(fresh) == before
    page.click("#clear")
    page.wait(ASKED)
    page.click("#confirm-yes")
    page.wait(shown("Nothing is cached yet."))
    assert hot_tokens(fresh) == 0


def test_fewer_bits_are_asked_for_and_more_are_not(page: Page, fresh: Served) -> None:
    complete(fresh, FIRST)
    page.open(fresh.url)
    page.wait(LOADED)
    page.wait("document.querySelector('#precision [name=k]').value === 'raw'")
    page.choose("#precision [name=k]", "planes:4")
    page.click("#precision [name=dry]")
    page.wait("!document.getElementById('apply').disabled")
    page.click("#apply")
    page.wait(ASKED)
    assert "Scores will be off by about" in page.text("#confirm-cost")
    assert "1 span goes to K planes:4, V raw" in page.text("#confirm-cost")
    page.click("#confirm [value=no]")
    page.wait(f"!{ASKED}")
    assert get(fresh, "/cache/usage")["target"] == {"k": "raw", "v": "raw"}
    page.choose("#precision [name=k]", "raw")
    page.click("#precision [name=dry]")
    page.wait("!document.getElementById('apply').disabled")
    page.click("#apply")
    page.wait("document.getElementById('apply').disabled")
    assert page.run(ASKED) is False


def test_pin_and_unpin_are_at_hand(page: Page, fresh: Served) -> None:
    two_conversations(fresh, page)
    page.click(f'{row_of("second")} [data-act="pin"]')
    page.wait(f"""document.querySelector('{row_of("second")} [data-act="unpin"]')""")
    assert get(fresh, "/cache/usage")["pinned_bytes"] > 0
    # The keyboard stays where it was, on the button that takes it back.
    page.click(f'{row_of("second")} [data-act="drop"]')
    page.wait(shown("It is pinned. Unpin it first."))
    assert page.run(ASKED) is False
    page.click(f'{row_of("second")} [data-act="unpin"]')
    page.wait(f"""document.querySelector('{row_of("second")} [data-act="pin"]')""")
    assert get(fresh, "/cache/usage")["pinned_bytes"] == 0


def test_a_request_opens_its_explanation(page: Page, fresh: Served) -> None:
    hostile = [ord(letter) - 32 for letter in "<img src=x onerror=document.title=1>"]
    complete(fresh, [*LONG, *hostile])
    changed = [*LONG[:100], *hostile, *LONG[100:]]
    answered = fresh.ask("/v1/completions", prompt=changed, max_tokens=3)
    fresh.wait_idle()
    page.open(fresh.url)
    row = f'[data-request="{answered.headers["x-request-id"]}"]'
    page.wait(f"document.querySelector('{row}')")
    cells = page.text(row).replace("\u00a0", " ")
    assert "completions" in cells
    assert f"{len(changed)}" in cells
    assert "diverged" in cells
    page.click(f"{row} td")
    page.wait(f"!document.querySelector('{row} + .details').hidden")
    page.wait(f"document.querySelector('{row} + .details .now')")
    said = page.text(f"{row} + .details").replace("\u00a0", " ")
    assert f"100 of {len(changed)} prompt tokens were cached" in said
    assert "It parts from the prompt before it in its session at token 100:" in said
    assert "The cached prompt differs from here on." in said
    assert answered.headers["x-request-id"] in said
    assert f"If its session went on now, {len(changed)} of " in said or "If its session went on now" in said
    assert page.run("document.querySelectorAll('#requests img').length") == 0
    # By the keyboard too, and what is open stays open when others come.
    page.run(f"document.querySelector('{row} button').focus()")
    complete(fresh, [9] * 30)
    page.wait(f"document.querySelector('tr.request').dataset.request !== {answered.headers['x-request-id']!r}")
    assert page.run(f"document.activeElement === document.querySelector('{row} button')") is True
    assert page.run("document.activeElement.ariaExpanded") == "true"
    page.press("Enter")
    page.wait(f"document.querySelector('{row} + .details').hidden")


@pytest.mark.parametrize("width", [390, 1280])
def test_what_is_new_fits_the_window_and_has_names(page: Page, fresh: Served, width: int) -> None:
    complete(fresh, FIRST, prompt_cache_key="x" * 80)
    complete(fresh, SECOND, prompt_cache_key="second")
    page.open(fresh.url, width=width, height=844)
    page.wait("document.querySelectorAll('.conversation').length === 2")
    page.wait("document.querySelector('tr.request')")
    page.click("tr.request button")
    page.wait("document.querySelector('.details:not([hidden]) .now')")
    assert page.run("document.documentElement.scrollWidth") == width
    page.click('[data-act="drop"]')
    page.wait(ASKED)
    assert page.run("document.getElementById('confirm').getBoundingClientRect().right") <= width
    unnamed = page.run(
        """[...document.querySelectorAll('button, [role=img], dialog[open]')].filter(it => !it.closest('[hidden]'))
          .filter(it => !(it.innerText?.trim() || it.ariaLabel || it.getAttribute('aria-labelledby')))
          .map(it => it.outerHTML)"""
    )
    assert unnamed == []
    page.press("Escape")
