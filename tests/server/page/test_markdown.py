"""Markdown in a real browser: the elements made from it, markup that stays text, and text that grows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.browser import Browser, Page
from tests.support.servers import Served

# No text becomes any other element or attribute.
TAGS = {
    "P", "H3", "H4", "H5", "H6", "UL", "OL", "LI", "BLOCKQUOTE", "HR", "BR", "EM", "STRONG", "DEL", "CODE", "PRE", "A",
    "TABLE", "THEAD", "TBODY", "TR", "TH", "TD", "DIV", "FIGURE", "FIGCAPTION", "SPAN", "BUTTON",
}  # fmt: skip
ATTRIBUTES = {"class", "href", "title", "rel", "target", "start", "tabindex", "role", "aria-label", "type"}
LINK = 'rel="noopener noreferrer nofollow" target="_blank"'


@pytest.fixture(scope="module")
def page(browser: Browser, page_server: Served) -> Iterator[Page]:
    """A tab for all tests of this file."""
    page = browser.page()
    page.open(page_server.url)
    page.run(
        """import('/dashboard/markdown.js').then(({Markdown}) => {
          globalThis.Markdown = Markdown;
          globalThis.drawn = (text) => { const it = new Markdown(); it.finish(text); return it.element };
        })"""
    )
    yield page
    assert page.complaints == []
    page.close()


def html(page: Page, text: str) -> str:
    return page.run(f"drawn({json.dumps(text)}).innerHTML")


def link(href: str, text: str = "") -> str:
    return f'<a href="{href}" title="{href}" {LINK}>{text or href}</a>'


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("One\ntwo\n\nthree", "<p>One<br>two</p><p>three</p>"),
        ("# One\n### Three ##\n#none", "<h3>One</h3><h5>Three</h5><p>#none</p>"),
        ("a **bold** *it* ~~no~~ c", "<p>a <strong>bold</strong> <em>it</em> <del>no</del> c</p>"),
        ("__b__ _i_ __init__.py", "<p><strong>b</strong> <em>i</em> <strong>init</strong>.py</p>"),
        ("***both*** and **a *b* c**", "<p><em><strong>both</strong></em> and <strong>a <em>b</em> c</strong></p>"),
        ("snake_case_name 2 * 3 * 4 **", "<p>snake_case_name 2 * 3 * 4 **</p>"),
        ("**重要。**文字", "<p><strong>重要。</strong>文字</p>"),
        (r"\*not\* \`this\` a\b", r"<p>*not* `this` a\b</p>"),
        ("`a` and ``b ` c`` and `open", "<p><code>a</code> and <code>b ` c</code> and `open</p>"),
        ("`**x** <b>`", "<p><code>**x** &lt;b&gt;</code></p>"),
        ("- a\n- b\n  - c\n- d", "<ul><li>a</li><li>b<ul><li>c</li></ul></li><li>d</li></ul>"),
        ("3. a\n4. b\n  - c", '<ol start="3"><li>a</li><li>b<ul><li>c</li></ul></li></ol>'),
        ("* a\n\n* b", "<ul><li><p>a</p></li><li><p>b</p></li></ul>"),
        ("- a\nlazy\n\nout", "<ul><li>a<br>lazy</li></ul><p>out</p>"),
        ("in the year\n1984. It was", "<p>in the year<br>1984. It was</p>"),
        ("Steps:\n1. a", "<p>Steps:</p><ol><li>a</li></ol>"),
        ("> a\n> - b\n\nc", "<blockquote><p>a</p><ul><li>b</li></ul></blockquote><p>c</p>"),
        ("a\n\n---\n***", "<p>a</p><hr><hr>"),
        ("see https://a.example/b_c(d). So", f"<p>see {link('https://a.example/b_c(d)')}. So</p>"),
        ("<mailto:x@y.z> (https://a.example/)", f"<p>{link('mailto:x@y.z')} ({link('https://a.example/')})</p>"),
        ('[a *b*](https://a.example/ "t") [c](d)', f"<p>{link('https://a.example/', 'a <em>b</em>')} [c](d)</p>"),
        ("[1] https://a.example/", f"<p>[1] {link('https://a.example/')}</p>"),
        ("![alt](https://a.example/x.png)", f"<p>{link('https://a.example/x.png', 'alt')}</p>"),
    ],
)  # fmt: skip
def test_markdown_becomes_elements(page: Page, text: str, wanted: str) -> None:
    assert html(page, text) == wanted


def test_table(page: Page) -> None:
    shown = html(page, "Before\n| a | b |\n|---|:-:|\n| 1 | `x \\| y` |\n| 2\n\nafter")
    head = '<thead><tr><th>a</th><th class="at-centre">b</th></tr></thead>'
    rows = '<tr><td>1</td><td class="at-centre"><code>x | y</code></td></tr><tr><td>2</td></tr>'
    assert f"<table>{head}<tbody>{rows}</tbody></table>" in shown
    assert shown.startswith("<p>Before</p>")
    assert shown.endswith("<p>after</p>")
    assert "<table" not in html(page, "| a | b |\n|---|\n\na | b\nc")


def test_code_block_keeps_every_character(page: Page) -> None:
    code = "  def f():\n\n      return '<b>' # *x* ```\n~~~"
    for text in (f"```python\n{code}\n```", f"````python title\n{code}\n````\n\nafter", f"```python\n{code}"):
        assert page.run(f"drawn({json.dumps(text)}).querySelector('pre').textContent") == code, text
    shown = html(page, f"1. do\n   ```sh\n   a\n     b\n   ```\n2. then\n\n```\n{code}\n```")
    assert "<code>a\n  b</code>" in shown
    assert shown.count("<li>") == 2
    assert "<span>sh</span>" in shown


HOSTILE = (
    "<script>globalThis.hit = 1</script>",
    "<img src=x onerror='globalThis.hit=1'>",
    "<svg/onload=globalThis.hit=1>",
    "[a](javascript:globalThis.hit=1)",
    "[a](JaVa\tScript:globalThis.hit=1)",
    "[a](<java\u0000script:hit()>)",
    "[a](data:text/html,<script>hit()</script>)",
    "[a](vbscript:x) [b](/cache/clear) [c](//evil.example) [d](file:///etc/passwd)",
    "<javascript:globalThis.hit=1>",
    '[a](https://x.example/"onmouseover="globalThis.hit=1)',
    '[a](https://x.example "t" onclick="globalThis.hit=1")',
    "![a](https://x.example/x.png\"onerror=\"globalThis.hit=1)",
    "```\"><script>globalThis.hit=1</script>\n<img src=x onerror=globalThis.hit=1>\n```",
    "| <img src=x onerror=globalThis.hit=1> |\n|---|\n| <script>globalThis.hit=1</script> |",
    "# <iframe srcdoc='<script>parent.hit=1</script>'>",
    "- <a href='javascript:hit()'>x</a>\n> <style>*{display:none}</style>",
    "&lt;script&gt;globalThis.hit=1&lt;/script&gt; &#106;avascript:",
    "**<b onclick=hit()>** `</code><script>globalThis.hit=1</script>`",
)  # fmt: skip
# Elements of a text after it was added to the document and events were sent to it.
FOUND = """(async (text) => {
  const element = drawn(text);
  document.body.append(element);
  for (const it of element.querySelectorAll('*')) it.dispatchEvent(new Event('mouseover', {bubbles: true}));
  await new Promise((resolve) => setTimeout(resolve, 0));
  element.remove();
  const all = [...element.querySelectorAll('*')];
  return {tags: all.map(it => it.tagName), attributes: all.flatMap(it => it.getAttributeNames()),
    links: all.filter(it => it.href).map(it => it.protocol), hit: globalThis.hit ?? null, text: element.textContent};
})(%s)"""


def assert_harmless(found: dict[str, Any]) -> None:
    assert set(found["tags"]) <= TAGS
    assert set(found["attributes"]) <= ATTRIBUTES
    assert set(found["links"]) <= {"http:", "https:", "mailto:"}
    assert found["hit"] is None


@pytest.mark.parametrize("text", HOSTILE)
def test_html_in_markdown_stays_text(page: Page, text: str) -> None:
    found = page.run(FOUND % json.dumps(text))
    assert_harmless(found)
    for tag in ("<script>", "<img", "<iframe", "<style>", "<svg"):
        assert found["text"].count(tag) == text.count(tag)


PIECES = (
    *"ab \n", "\n\n", "# ", "- ", "  - ", "1. ", "> ", "```", "```js\n", "`", "``", "*", "**", "_", "~~", "[", "]",
    "](", "![", "(https://a.example)", "](https://b.example)", "](javascript:x)", "<", ">", "<script>", "</", "|",
    "|---|\n", "| a | b |\n", "\\", "https://c.example/", "---\n", "    ", "\t", "é", "重", "😀", ")", "&amp;", "\x00",
)  # fmt: skip
# Compares a text drawn as it grows with the text drawn at once, and collects all that was drawn meanwhile.
GROWN = """(texts => texts.map((text) => {
  const whole = drawn(text), grown = new Markdown(), tags = new Set(), attributes = new Set(), links = new Set();
  const note = (element) => {
    for (const it of element.querySelectorAll('*')) {
      tags.add(it.tagName);
      for (const name of it.getAttributeNames()) attributes.add(name);
      if (it.href) links.add(it.protocol);
    }
  };
  for (let end = 1; end <= text.length; end += 1) {
    grown.show(text.slice(0, end), true);
    note(grown.element);
  }
  grown.finish(text);
  note(grown.element);
  return {same: grown.element.isEqualNode(whole), tags: [...tags], attributes: [...attributes], links: [...links],
    hit: globalThis.hit ?? null};
}))(%s)"""


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.sampled_from(PIECES), max_size=30).map("".join), min_size=1, max_size=20))
def test_any_text_is_harmless_and_growing_gives_the_same_elements(page: Page, texts: list[str]) -> None:
    for text, found in zip(texts, page.run(GROWN % json.dumps(texts)), strict=True):
        assert_harmless(found)
        assert found["same"], text


def test_earlier_blocks_are_not_replaced_while_text_grows(page: Page) -> None:
    text = "A *first* part.\n\n```python\nprint(1)\nprint(2)\n```\n\n- one\n- two\n\nThe **last** one."
    changed = page.run(
        """((text) => {
          const grown = new Markdown();
          const seen = [];
          for (let end = 1; end <= text.length; end += 1) {
            grown.show(text.slice(0, end), true);
            const [paragraph, code] = grown.element.children;
            seen.push([paragraph, code?.querySelector('code')?.firstChild]);
          }
          const from = (end, which) => new Set(seen.slice(end).map((each) => each[which])).size;
          const code = text.indexOf('print');
          // The elements drawn while it grew are right without a repair at the end.
          grown.show(text);
          const same = grown.element.isEqualNode(drawn(text));
          return [from(text.indexOf('```'), 0), from(code, 1), seen.at(-1)[1].data, same];
        })"""
        f"({json.dumps(text)})"
    )
    assert changed == [1, 1, "print(1)\nprint(2)", True]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("is **very impor", "<p>is <strong>very impor</strong></p>"),
        ("is **very important*", "<p>is <strong>very important</strong></p>"),
        ("run `ls -", "<p>run <code>ls -</code></p>"),
        ("see [the docs](https://exa", "<p>see the docs</p>"),
        ("costs 5*x and", "<p>costs 5*x and</p>"),
    ],
)
def test_open_constructs_are_drawn_as_if_closed(page: Page, text: str, wanted: str) -> None:
    drawn = "((text) => { const it = new Markdown(); it.show(text, true); return it.element.innerHTML })"
    assert page.run(f"{drawn}({json.dumps(text)})") == wanted


LONG = 60_000


HEAVY = (
    "[", "*a ", "**a", "```a", "](", "[a](", "[*a", "> ", "- ", "_a*b", "<", "https://", "|", "\\", "~~a", "a* ", " ",
    "#", '![a](b "', "`a``",
)  # fmt: skip


@pytest.mark.parametrize("piece", HEAVY)
@pytest.mark.perf
def test_time_is_linear_in_the_length_of_the_text(page: Page, piece: str) -> None:
    """Quadratic time would be minutes for texts of this length."""
    text = piece * (LONG // len(piece))
    timed = "((text) => { const began = performance.now(); drawn(text); return performance.now() - began })"
    took_ms = page.run(f"{timed}({json.dumps(text)})")
    assert took_ms < 4000
