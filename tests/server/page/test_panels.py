"""Panels of the page in a real browser: figures, charts, requests, sessions, and the forms for precision and misses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvstrata.server.dashboard import FILES
from tests.agents.forced import forced_model
from tests.server.page.conftest import IS_ASKED, LOADED, shown
from tests.server.test_cache import LONG, complete, get, post, wait_done
from tests.support.browser import Browser, Page
from tests.support.eventually import eventually
from tests.support.models import tiny_loaded
from tests.support.servers import Served, running

FIRST = [*LONG, 7, 8]


def test_files_are_served_with_type_and_security_headers(page_server: Served) -> None:
    assert {"/", "/dashboard/main.js", "/dashboard/style.css", "/dashboard/icon.svg"} <= FILES.keys()
    with page_server.http() as http:
        for path, file in FILES.items():
            answer = http.get(path)
            assert answer.content == file.body
            assert answer.headers["content-type"] == file.media_type
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert http.get("/dashboard/nothing.js").status_code == 404
        assert http.get("/dashboard/__init__.py").status_code == 404
        assert "unsafe-inline" not in http.get("/").headers["content-security-policy"]


def test_recent_requests_have_a_column_for_misses_and_errors(page_server: Served) -> None:
    with page_server.http() as http:
        page = http.get("/").text
    assert '<th scope="col">miss or error</th>' in page
    assert "missed because" not in page


@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_page_fits_its_window_in_both_colour_schemes(
    browser: Browser, fresh: Served, tmp_path: Path, width: int, height: int, dark: bool
) -> None:
    complete(fresh, LONG)
    page = browser.page()
    page.open(fresh.url, width=width, height=height, dark=dark)
    page.wait(LOADED)
    page.wait("document.querySelectorAll('#legend tr').length === 1")
    assert page.run("document.documentElement.scrollWidth") == width
    background = page.run("getComputedStyle(document.body).backgroundColor")
    red = int(background.removeprefix("rgb(").partition(",")[0])
    assert (red < 60) == dark
    page.screenshot(tmp_path / "page.png")
    assert page.complaints == []
    page.close()


def test_new_server_shows_that_nothing_is_cached(browser: Browser) -> None:
    """Needs a new server: the history of `fresh` contains the KV of other tests."""
    page = browser.page()
    with running(tiny_loaded("llama")) as new:
        page.open(new.url)
        page.wait(LOADED)
        assert "Nothing is cached yet" in page.text("#chart")
    page.close()


def test_figures_are_those_of_the_api(page: Page, fresh: Served) -> None:
    complete(fresh, LONG)
    complete(fresh, [*LONG, 7])
    post(fresh, "/cache/requantize", k="planes:8", v="planes:4")
    wait_done(fresh)
    usage = get(fresh, "/cache/usage")
    hot = usage["tiers"]["hot"]
    page.wait(f"document.querySelector('[data-figure=cached] .value').innerText.startsWith('{hot['tokens']}')")
    page.wait("document.querySelectorAll('#legend tr').length === 2")
    for name, nbytes in hot["by_precision"].items():
        row = page.text(f'[data-precision="{name}"]').replace("\u00a0", " ")
        assert f"{nbytes / 1024:.1f} KiB" in row, row
    counters = usage["counters"]
    hits, queried = counters["hit_tokens"], counters["queried_tokens"]
    assert page.text("[data-figure=hits] .value").startswith(f"{hits:,}")
    assert page.text("[data-figure=hit-rate] .value").startswith(f"{100 * hits / queried:.1f}")
    # A layer for each of the two precisions.
    assert page.run("document.querySelectorAll('#chart path.layer').length") >= 2
    page.wait(shown("K planes:8, V planes:4"))
    page.wait("document.getElementById('events').innerText.includes('Precision of new KV: K planes:8, V planes:4')")


def test_running_request_is_drawn_in_parts(page: Page, fresh: Served) -> None:
    complete(fresh, LONG)
    post(fresh, "/cache/requantize", k="planes:8", v="planes:4")
    wait_done(fresh)
    with fresh.openai() as client:
        stream = client.completions.create(model=fresh.name, prompt=[*LONG, 3, 3], max_tokens=4000, stream=True)
        next(stream)
        [sequence] = get(fresh, "/cache/usage")["sequences"]
        page.wait(f"document.querySelector('[data-id=\"{sequence['id']}\"] .part')")
        colours = page.run(
            """[...document.querySelectorAll('.part')]
              .map(it => [...it.querySelectorAll('i')].map(half => half.style.background))"""
        )
        assert colours[0] == ["var(--b8)", "var(--b4)"]
        assert colours[-1] == ["var(--raw)", "var(--raw)"]
        assert "planes:8 / planes:4" in page.run("document.querySelector('.parts').ariaLabel")
        stream.close()
    page.wait(shown("No request is running."))


def test_precision_is_applied_after_a_dry_run(page: Page, fresh: Served) -> None:
    complete(fresh, LONG)
    page.choose("#precision [name=k]", "planes:4")
    page.choose("#precision [name=v]", "planes:4")
    assert page.run("document.getElementById('apply').disabled") is True
    page.click("#precision [name=dry]")
    page.wait("document.querySelector('#precision-result .headline')")
    said = post(fresh, "/cache/requantize", k="planes:4", v="planes:4", dry_run=True)
    result = page.text("#precision-result").replace("\u00a0", " ")
    assert f"would free {(said['bytes_before'] - said['bytes_after']) / 1024:.0f} KiB" in result
    hot = said["tiers"]["hot"]
    assert f"{int(hot['bytes_before'] / 1024 + 0.5)} KiB → " in result  # JavaScript rounds a half up
    assert f", {hot['bytes_freed'] / 1024:.0f} KiB less" in result
    assert f"{100 * said['expected_error']:.1f} %" in result
    assert get(fresh, "/cache/usage")["target"] == {"k": "raw", "v": "raw"}

    # The dry run was for another choice.
    page.choose("#precision [name=v]", "planes:2")
    assert page.run("document.getElementById('apply').disabled") is True
    page.choose("#precision [name=v]", "planes:4")
    page.click("#precision [name=dry]")
    page.wait("!document.getElementById('apply').disabled")
    page.click("#apply")
    page.wait("document.getElementById('confirm').open")
    page.click("#confirm-yes")
    page.wait("document.querySelector('#precision-result .headline').innerText.startsWith('frees')")
    wait_done(fresh)
    usage = get(fresh, "/cache/usage")
    assert usage["target"] == {"k": "planes:4", "v": "planes:4"}
    assert usage["tiers"]["hot"]["bytes"] == said["bytes_after"]
    page.wait("document.querySelector('#legend').innerText.includes('planes:4')")


def test_errors_of_the_server_are_shown(browser: Browser, fresh: Served) -> None:
    page = browser.page()
    page.open(fresh.url)
    page.wait(LOADED)
    page.run("document.querySelector('#precision [name=k]').add(new Option('planes:5'))")
    page.choose("#precision [name=k]", "planes:5")
    page.click("#precision [name=dry]")
    page.wait("document.querySelector('#precision-result .error')")
    assert "planes" in page.text("#precision-result")
    page.choose("#explain [name=kind]", "json")
    page.type("#explain textarea", "{not json")
    page.click("#explain button")
    page.wait("document.querySelector('#explain-result .error')")
    page.close()


def test_explain_shows_the_end_of_the_cached_prefix_as_text(page: Page, fresh: Served) -> None:
    hostile = [ord(letter) - 32 for letter in "<img src=x onerror=document.title=1>"]
    complete(fresh, [*LONG, *hostile])
    page.choose("#explain [name=kind]", "json")
    page.type("#explain textarea", json.dumps({"tokens": [*LONG, *hostile[:-1], 5, 5]}))
    page.click("#explain button")
    page.wait("document.querySelector('#explain-result .headline')")
    result = page.text("#explain-result")
    cached = len(LONG) + len(hostile) - 1
    assert f"{cached} of {cached + 2} tokens are cached" in result
    assert "diverged" in result
    assert "title=1" in page.text("#explain-result .context")
    assert page.run("document.querySelectorAll('#explain-result img').length") == 0
    assert page.run("document.title") == f"kvstrata: {fresh.name}"


def test_explain_shows_changes_to_the_prompt(tab: Page) -> None:
    """Needs a model with a chat template."""
    bill = {"role": "system", "content": "x-anthropic-billing-header: cch=1;\nYou are an agent."}
    note = {"role": "system", "content": "Be brief."}
    user = {"role": "user", "content": "Hello."}
    with running(forced_model()) as served:
        tab.open(served.url)
        tab.wait(LOADED)
        tab.choose("#explain [name=kind]", "json")
        tab.type("#explain textarea", json.dumps({"messages": [bill, user, note, user]}))
        tab.click("#explain button")
        tab.wait("document.querySelector('#explain-result .headline')")
        result = tab.text("#explain-result")
        tab.open("about:blank")  # a page without its server complains
    assert "left out of system messages: 1." in result
    assert "stayed where they are: 1." in result


def test_key_is_asked_for_and_kept_in_its_tab(browser: Browser) -> None:
    page = browser.page()
    with running(tiny_loaded("llama"), api_key=["open-sesame"]) as locked:
        with locked.http() as http:
            assert http.get("/").status_code == 200
            assert http.get("/cache/usage").status_code == 401
        page.open(locked.url)
        page.wait("document.getElementById('key').open")
        assert page.run("document.getElementById('main').hidden") is True
        page.type("#key input", "wrong")
        page.press("Enter")
        page.wait(shown("That key was not accepted."))
        page.type("#key input", "open-sesame")
        page.press("Enter")
        page.wait(LOADED)
        assert page.run("document.getElementById('key').open") is False
        assert page.text("#status") == "live"
        assert page.run("Object.values(sessionStorage)") == ["open-sesame"]
        assert page.run("[localStorage.length, document.cookie]") == [0, ""]
    page.wait("document.getElementById('status').innerText === 'no answer'")
    page.close()


def test_chart_can_be_read_by_keyboard_and_screen_reader(page: Page, fresh: Served) -> None:
    complete(fresh, LONG)
    page.wait("document.querySelectorAll('#legend tr').length === 1")
    unnamed = page.run(
        """[...document.querySelectorAll('input, select, textarea, button, svg[tabindex], ol[tabindex]')]
          .filter(it => !(it.labels?.length || it.getAttribute('aria-label') || it.getAttribute('aria-labelledby')
            || (it.tagName === 'BUTTON' && it.innerText.trim()) || it.closest('[hidden], dialog')))
          .map(it => it.outerHTML)"""
    )
    assert unnamed == []
    page.run("document.querySelector('#chart svg').focus()")
    page.press("ArrowLeft")
    page.wait("document.getElementById('legend-when').innerText.endsWith('s ago')")
    assert "seconds ago: " in page.run("document.querySelector('#chart svg').getAttribute('aria-valuetext')")
    page.press("Escape")
    page.wait("document.getElementById('legend-when').innerText === 'now'")
    assert page.run("[...document.querySelectorAll('h1, h2')].length") >= 7


def test_focus_stays_on_the_precision_form(page: Page, fresh: Served) -> None:
    complete(fresh, LONG)
    page.choose("#precision [name=k]", "planes:4")
    page.run("document.querySelector('#precision [name=dry]').focus()")
    page.press("Enter")
    page.wait("document.querySelector('#precision-result .headline') && !document.getElementById('apply').disabled")
    assert page.run("document.activeElement.name") == "dry"
    page.run("document.getElementById('apply').focus()")
    page.press("Enter")
    page.wait("document.getElementById('confirm').open")
    page.run("document.getElementById('confirm-yes').focus()")
    page.press("Enter")
    # Applied; the button needs another dry run.
    page.wait("document.getElementById('apply').disabled && !document.querySelector('#precision [name=dry]').disabled")
    assert page.run("document.activeElement.name") == "dry"


def test_sessions_are_listed_with_their_divergence(page: Page, fresh: Served, tmp_path: Path) -> None:
    complete(fresh, LONG, prompt_cache_key="orchard-1")
    complete(fresh, [*LONG[:100], 1, *LONG[101:]], prompt_cache_key="orchard-1")
    page.wait("document.querySelector('[data-session=\"orchard-1\"] .divergence')")
    row = page.text('[data-session="orchard-1"]').replace("\u00a0", " ")
    assert "Request 2 diverged from the previous prompt at token 100: it was" in row
    session = get(fresh, "/cache/sessions/orchard-1")
    assert f"{100 * session['hit_rate']:.1f} %" in row
    assert f"memory {session['held']['hot']}" in row
    assert "raw" in row
    page.resize(390, 844)
    assert page.run("document.documentElement.scrollWidth") == 390
    page.screenshot(tmp_path / "sessions.png")


def wait_for_history(served: Served, precision: str) -> None:
    """Wait until the history has a slot with KV in this precision."""

    def has_precision() -> bool:
        slots = get(served, "/cache/history")["slots"]
        return any(slot["tiers"] and precision in slot["tiers"]["hot"]["by_precision"] for slot in slots[-3:])

    eventually(has_precision, 60)


def test_reload_keeps_history(tab: Page, fresh: Served) -> None:
    complete(fresh, FIRST)
    complete(fresh, FIRST)
    wait_for_history(fresh, "raw")
    post(fresh, "/cache/requantize", k="planes:8", v="planes:8")
    wait_for_history(fresh, "planes:8")
    seen = []
    for _ in range(2):
        tab.open(fresh.url)
        # All of this happened before the page was opened.
        tab.wait("document.querySelector('[data-plot=ttft] .dot')")
        tab.wait("document.querySelector('[data-plot=rate] .area')")
        tab.wait(shown("Precision of new KV: K planes:8, V planes:8"))
        tab.wait(shown("Spans quantized: 1 (planes:8, "))
        tab.wait("document.querySelectorAll('#chart path.layer').length >= 2")
        seen.append(tab.run("[...document.querySelectorAll('tr.request')].map(it => it.dataset.request)"))
    expected = [request["id"] for request in get(fresh, "/cache/history")["requests"]]
    assert seen[0] == seen[1] == expected[::-1][:12]
    # Points of the chart that are older than the tab.
    assert tab.run("Number(document.querySelector('#chart svg').getAttribute('aria-valuemin'))") <= -2
    tab.run("document.querySelector('#chart svg').focus()")
    tab.press("ArrowLeft")
    tab.wait("document.querySelector('[data-plot=rate] .cursor')")


def test_limit_is_drawn_in_the_chart(tab: Page, fresh: Served) -> None:
    complete(fresh, FIRST)
    tab.open(fresh.url)
    tab.wait("document.querySelector('#chart .limit-line')")
    top, height = tab.run(
        """(() => { const box = document.querySelector('#chart').getBoundingClientRect();
        return [document.querySelector('#chart .limit-line').getBoundingClientRect().top - box.top, box.height] })()"""
    )
    assert 0 < top < height
    # The limit is far above the cached bytes, so the axis is interrupted.
    assert tab.run("document.querySelectorAll('#chart .axis-break').length") == 1
    assert f"kvstrata plan {fresh.name}" in tab.text("#limit")
    assert tab.run("document.querySelector('#chart .limit').textContent").startswith("limit ")


def test_reducing_precision_needs_confirmation_and_raising_does_not(tab: Page, fresh: Served) -> None:
    complete(fresh, FIRST)
    tab.open(fresh.url)
    tab.wait(LOADED)
    tab.wait("document.querySelector('#precision [name=k]').value === 'raw'")
    tab.choose("#precision [name=k]", "planes:4")
    tab.click("#precision [name=dry]")
    tab.wait("!document.getElementById('apply').disabled")
    tab.click("#apply")
    tab.wait(IS_ASKED)
    assert "Expected error of attention scores: " in tab.text("#confirm-cost")
    assert "1 span is transcoded to K planes:4, V raw" in tab.text("#confirm-cost")
    tab.click("#confirm [value=no]")
    tab.wait(f"!{IS_ASKED}")
    assert get(fresh, "/cache/usage")["target"] == {"k": "raw", "v": "raw"}
    tab.choose("#precision [name=k]", "raw")
    tab.click("#precision [name=dry]")
    tab.wait("!document.getElementById('apply').disabled")
    tab.click("#apply")
    tab.wait("document.getElementById('apply').disabled")
    assert tab.run(IS_ASKED) is False


def test_request_opens_its_details(tab: Page, fresh: Served) -> None:
    hostile = [ord(letter) - 32 for letter in "<img src=x onerror=document.title=1>"]
    complete(fresh, [*LONG, *hostile])
    changed = [*LONG[:100], *hostile, *LONG[100:]]
    answered = fresh.ask("/v1/completions", prompt=changed, max_tokens=3)
    fresh.wait_idle()
    tab.open(fresh.url)
    row = f'[data-request="{answered.headers["x-request-id"]}"]'
    tab.wait(f"document.querySelector('{row}')")
    cells = tab.text(row).replace("\u00a0", " ")
    assert "completions" in cells
    assert f"{len(changed)}" in cells
    assert "diverged" in cells
    tab.click(f"{row} td")
    tab.wait(f"!document.querySelector('{row} + .details').hidden")
    tab.wait(f"document.querySelector('{row} + .details .now')")
    said = tab.text(f"{row} + .details").replace("\u00a0", " ")
    assert f"100 of {len(changed)} prompt tokens were cached" in said
    assert "It diverges from the previous prompt of its session at token 100:" in said
    assert "The cached prompt differs from here on." in said
    assert answered.headers["x-request-id"] in said
    assert "If its session continued now, " in said
    assert tab.run("document.querySelectorAll('#requests img').length") == 0
    # The keyboard closes it, and it stays open when other requests are added.
    tab.run(f"document.querySelector('{row} button').focus()")
    complete(fresh, [9] * 30)
    tab.wait(f"document.querySelector('tr.request').dataset.request !== {answered.headers['x-request-id']!r}")
    assert tab.run(f"document.activeElement === document.querySelector('{row} button')") is True
    assert tab.run("document.activeElement.ariaExpanded") == "true"
    tab.press("Enter")
    tab.wait(f"document.querySelector('{row} + .details').hidden")
