"""The chat of the page, in a real browser, with a real server whose model replies as the last message asks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agents.forced import Forced, Prompt, serving
from tests.server.page.conftest import LOADED
from tests.support.browser import Browser, Page

IDLE = """!document.querySelector('#chat [name=send]').hidden
  && document.querySelector('.message.assistant footer').innerText"""
HOSTILE = "<img src=x onerror=document.title=1> <script>document.title=1</script> **[x](javascript:document.title=1)**"
WIDE = "a_very_long_name_" * 12
RICH = f"""# Ways to sort

A list can be sorted **in place** or *copied*; `sorted` copies, see [the manual](https://docs.example/sorted).

1. In place:
   - `list.sort()`
   - stable
2. A copy

```python
def by_size(names: list[str]) -> list[str]:
    return sorted(names, key=lambda name: (len(name), name, {WIDE}))
```

| way | memory | stable |
|:----|-------:|:------:|
| `sort` | none | yes |
| `sorted` | a copy of {WIDE} | yes |

> Neither is slow.
"""
SAID = {
    "rich": RICH,
    "hostile": HOSTILE,
    "think": f"<think>\nFirst *this*, then {HOSTILE}\n</think>\n\nIt is **four**.",
    "list": "- entry\n" * 40,  # taller than the log
    "go on": "again and " * 3000,
}


def script(prompt: Prompt) -> str:
    return SAID.get(prompt.turns[-1].text, "A plain answer of some words.")


@pytest.fixture(scope="module")
def forced() -> Iterator[Forced]:
    with serving(script) as one:
        yield one


@pytest.fixture
def page(tab: Page, forced: Forced) -> Page:
    tab.open(forced.served.url)
    tab.wait(LOADED)
    return tab


def send(page: Page, text: str) -> None:
    page.type("#chat [name=text]", text)
    page.press("Enter")


def press_button(page: Page, button: str) -> None:
    """Press a button by the keyboard, because it may move while other panels fill."""
    page.run(f"document.querySelector({json.dumps(button)}).focus()")
    page.press("Enter")


def ask(page: Page, text: str) -> None:
    """Send a message and wait for the whole reply."""
    replies = page.run("document.querySelectorAll('.message.assistant').length")
    send(page, text)
    page.wait(f"document.querySelectorAll('.message.assistant').length === {replies + 1}")
    page.wait(IDLE, 120)


def last(page: Page, inside: str) -> Any:
    """Evaluate an expression on the last reply."""
    return page.run(f"[...document.querySelectorAll('.message.assistant')].at(-1){inside}")


def test_streamed_reply_is_drawn_as_markdown(page: Page) -> None:
    page.run(
        """globalThis.lengths = new Set();
        new MutationObserver(() => lengths.add(document.querySelector('.message.assistant .content')?.innerText.length))
          .observe(document.getElementById('chat-log'), {subtree: true, childList: true, characterData: true})"""
    )
    ask(page, "rich")
    assert page.run("lengths.size") > 3, "the reply was drawn in one piece"
    kinds = last(
        page, ".querySelector('.content').innerHTML.match(/<(h3|strong|em|ol|ul|pre|table|blockquote)>?/g).length"
    )
    assert kinds >= 8
    assert last(page, ".querySelector('h3').innerText") == "Ways to sort"
    assert last(page, ".querySelector('a').href") == "https://docs.example/sorted"
    assert "def by_size" in last(page, ".querySelector('pre code').textContent")
    assert page.run("document.querySelector('.message.assistant').hasAttribute('aria-busy')") is False


def test_reply_shows_its_figures_and_the_next_prompt_contains_it(page: Page, forced: Forced) -> None:
    ask(page, "Hello there.")
    assert "time to first token" in last(page, ".querySelector('footer').innerText")
    assert "tokens/s" in last(page, ".querySelector('footer').innerText")
    ask(page, "And more?")
    said = forced.said[-1]
    assert said.cached_tokens > 10
    assert last(page, ".querySelector('footer b').innerText") == f"{said.cached_tokens} of {len(said.ids)}"
    assert [turn.text for turn in said.prompt.turns] == ["Hello there.", "A plain answer of some words.", "And more?"]


def test_html_in_messages_stays_text(page: Page) -> None:
    ask(page, HOSTILE)
    ask(page, "hostile")
    assert page.run("document.querySelector('.message.user .content').textContent") == HOSTILE
    assert "<script>document.title=1</script>" in last(page, ".querySelector('.content').textContent")
    assert page.run("document.querySelectorAll('#chat-log :is(img, script, a)').length") == 0
    page.open(page.run("location.href"))
    page.wait("document.querySelectorAll('.message').length === 4")
    assert page.run("document.querySelectorAll('#chat-log :is(img, script, a)').length") == 0
    page.wait(LOADED)
    assert page.run("document.title") == "kvstrata: forced"


def test_settings_are_sent_and_survive_a_reload(page: Page, forced: Forced) -> None:
    press_button(page, ".settings summary")
    page.run(
        """(() => { const real = fetch; globalThis.sent = [];
        globalThis.fetch = (path, options) => {
          if (options.body) sent.push(JSON.parse(options.body));
          return real(path, options);
        } })()"""
    )
    page.type("#chat [name=system]", "Answer in rhyme.")
    page.choose("#chat [name=temperature]", "0.3")
    page.choose("#chat [name=max_tokens]", "5")
    ask(page, "Hello there.")
    assert [(turn.role, turn.text) for turn in forced.said[-1].prompt.turns] == [
        ("system", "Answer in rhyme."),
        ("user", "Hello there."),
    ]
    [body] = page.run("sent")
    assert (body["temperature"], body["max_tokens"], body["stream"]) == (0.3, 5, True)
    assert len(forced.said[-1].reply_ids) > 5
    assert last(page, ".querySelector('.content').innerText") != "A plain answer of some words."
    page.open(page.run("location.href"))
    assert page.run("document.querySelector('#chat [name=system]').value") == "Answer in rhyme."
    assert page.text("#chat-settings-summary") == "temperature 0.3, at most 5 tokens, with a system prompt"
    # Empty settings are not sent.
    page.wait(LOADED)
    for name in ("system", "temperature", "max_tokens"):
        page.choose(f"#chat [name={name}]", "")
    ask(page, "Hello again.")
    assert forced.said[-1].prompt.turns[0].role == "user"


def test_invalid_setting_unfolds_the_settings(page: Page) -> None:
    page.choose("#chat [name=temperature]", "9")
    send(page, "Hello there.")
    page.wait("document.querySelector('.settings').open")
    assert page.run("document.querySelectorAll('.message').length") == 0


def test_thinking_is_folded_and_sent_back(page: Page, forced: Forced) -> None:
    ask(page, "think")
    assert last(page, ".querySelector('.content').innerHTML") == "<p>It is <strong>four</strong>.</p>"
    assert last(page, ".querySelector('details').open") is False
    assert last(page, ".querySelector('summary').innerText").startswith("Thought for 0.")
    assert "First" not in page.text(".message.assistant")
    press_button(page, ".message.assistant summary")
    assert "First this, then <img" in page.text(".message.assistant details")
    assert page.run("document.querySelectorAll('#chat-log :is(img, script, a)').length") == 0
    ask(page, "And then?")
    assert "<think>\nFirst *this*" in forced.said[-1].prompt.turns[1].text


def test_stop_keeps_the_text_received(page: Page, forced: Forced) -> None:
    page.choose("#chat [name=max_tokens]", "")
    send(page, "go on")
    page.wait("document.querySelector('.message.assistant .content')?.innerText.length > 40", 120)
    press_button(page, "#chat-stop")
    page.wait(IDLE)
    kept = last(page, ".querySelector('.content').innerText")
    assert SAID["go on"].startswith(kept)
    assert 40 < len(kept) < 25_000
    forced.served.wait_idle()
    # The stopped stream had no usage, so the figures come from the history of the server.
    page.wait("document.querySelector('.message.assistant footer').innerText.includes('tokens/s')")
    note = page.text(".message.assistant footer")
    assert note.startswith("stopped, ")
    assert f"of {len(forced.said[-1].ids)} prompt tokens cached" in note
    ask(page, "Hello there.")
    # innerText has no trailing space.
    assert [turn.text.strip() for turn in forced.said[-1].prompt.turns] == ["go on", kept, "Hello there."]


def test_reload_keeps_the_chat_and_new_chat_empties_it(page: Page, forced: Forced) -> None:
    ask(page, "think")
    before = page.run("document.getElementById('chat-log').innerHTML")
    page.choose("#chat [name=max_tokens]", "")
    send(page, "go on")
    page.wait("document.querySelectorAll('.message.assistant .content')[1]?.innerText.length > 40", 120)
    page.open(forced.served.url)
    page.wait(LOADED)
    # Including the reply that was being streamed.
    assert page.run("document.getElementById('chat-log').innerHTML").startswith(before)
    assert last(page, ".querySelector('.content').innerText").startswith("again and again")
    assert last(page, ".querySelector('footer').innerText").startswith("stopped")
    press_button(page, "#chat-new")
    assert page.run("document.querySelectorAll('.message').length") == 0
    page.open(forced.served.url)
    page.wait(LOADED)
    assert page.run("document.querySelectorAll('.message').length") == 0
    ask(page, "Hello there.")
    assert len(forced.said[-1].prompt.turns) == 1


def test_new_chat_aborts_the_running_reply(page: Page, forced: Forced) -> None:
    page.choose("#chat [name=max_tokens]", "")
    send(page, "go on")
    page.wait("document.querySelector('.message.assistant .content')?.innerText.length > 10", 120)
    press_button(page, "#chat-new")
    ask(page, "Hello there.")
    assert page.run("[...document.querySelectorAll('.message')].map(it => it.querySelector('.content').innerText)") == [
        "Hello there.",
        "A plain answer of some words.",
    ]
    assert len(forced.said[-1].prompt.turns) == 1
    forced.served.wait_idle()


def test_failed_reply_shows_the_error_and_can_be_regenerated(page: Page, forced: Forced) -> None:
    page.run(
        """globalThis.fetch = ((real) => (...all) =>
          all[0].startsWith('/v1') ? Promise.reject(new Error('no way')) : real(...all))(fetch)"""
    )
    send(page, "Hello there.")
    page.wait("document.querySelector('.message.assistant footer .error')?.innerText === 'no way'")
    page.open(forced.served.url)
    page.wait(LOADED)
    press_button(page, "#chat-regenerate")
    page.wait("document.querySelector('.message.assistant footer b')")
    assert [turn.text for turn in forced.said[-1].prompt.turns] == ["Hello there."]
    assert page.run("document.querySelectorAll('.message').length") == 2


def test_copy_button_copies_code(page: Page, browser: Browser, forced: Forced) -> None:
    permissions = ["clipboardReadWrite", "clipboardSanitizedWrite"]
    browser.send("Browser.grantPermissions", origin=forced.served.url, permissions=permissions)
    ask(page, "rich")
    page.send("Page.bringToFront")
    press_button(page, ".message.assistant .copy")
    page.wait("document.querySelector('.message.assistant .copy').innerText === 'Copied'")
    assert page.run("navigator.clipboard.readText()") == last(page, ".querySelector('pre code').textContent")


def test_wide_content_does_not_widen_the_page(page: Page, forced: Forced, tmp_path: Path) -> None:
    ask(page, f"Sort these, please: {WIDE}")
    ask(page, "think")
    ask(page, "rich")
    for width, height, dark in ((1280, 900, False), (390, 844, False), (1280, 900, True), (390, 844, True)):
        page.open(forced.served.url, width=width, height=height, dark=dark)
        page.wait(LOADED)
        assert page.run("document.querySelectorAll('.message').length") == 6
        assert page.run("document.documentElement.scrollWidth") == width
        assert page.run("(log => log.scrollWidth <= log.clientWidth)(document.getElementById('chat-log'))") is True
        unnamed = page.run(
            """[...document.querySelectorAll('.chat :is(input, textarea, button, [tabindex])')]
              .filter(it => !(it.labels?.length || it.getAttribute('aria-label') || it.textContent.trim()))
              .map(it => it.outerHTML)"""
        )
        assert unnamed == []
        page.screenshot(tmp_path / "chat.png")


def test_log_follows_the_reply_unless_scrolled_up(page: Page) -> None:
    ask(page, "list")
    page.choose("#chat [name=max_tokens]", "")
    page.run("document.getElementById('chat-log').scrollTop = 0")
    send(page, "go on")
    length = "document.querySelectorAll('.message.assistant .content')[1]?.innerText.length"
    page.wait(f"{length} > 40", 120)
    at_end = "(log => log.scrollHeight - log.scrollTop - log.clientHeight < 40)(document.getElementById('chat-log'))"
    assert page.run(at_end) is True
    page.run("document.getElementById('chat-log').scrollTop = 0")
    page.wait(f"{length} > {page.run(length) + 200}", 120)
    assert page.run("document.getElementById('chat-log').scrollTop") == 0
    press_button(page, "#chat-stop")
    page.wait(IDLE)


def test_unreadable_stored_chat_is_ignored(page: Page, forced: Forced) -> None:
    for kept in ("{", "null", "[]", json.dumps({"turns": [{"role": "x"}, 3, {"role": "user", "content": "Kept."}]})):
        page.run(f"sessionStorage.setItem('kvstrata.chat', {json.dumps(kept)})")
        page.open(forced.served.url)
        page.wait(LOADED)
    assert page.run("[...document.querySelectorAll('.message')].map(it => it.innerText)") == ["You:\nKept."]
