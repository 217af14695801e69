"""Writes the parts of the docs that the code knows best: python -m tests.docs.make

Makes docs/messages.md, and the tables between `<!-- made: ... -->` and `<!-- end -->` in other pages. Tests compare
what is there with what would be written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from fastapi import FastAPI

from kvstrata import errors
from kvstrata.metrics import CACHE_LEVELS, Metrics
from kvstrata.server import app as server_app
from tests.docs import fits
from tests.docs.sources import ROOT, Message, error_classes, is_a, messages

DOCS = ROOT / "docs"
MESSAGES = DOCS / "messages.md"
HEAD = """# Every message

What clients can be answered, by status. `…` stands for a name, a number or a reason. The list is made from the source
(`python -m tests.docs.make`), and a test compares the two. [Troubleshooting](troubleshooting.md) says what to do; most
messages say it themselves.
"""


def messages_page() -> str:
    kinds = [name for name in error_classes() if is_a(name, "RequestError")]
    parts = [HEAD]
    for name in sorted(kinds, key=lambda name: (getattr(errors, name).status, name)):
        texts = sorted({each.shown() for each in messages() if each.said_by == name and _tells(each)})
        if texts:
            kind = getattr(errors, name)
            code = f", `{kind.code}`" if kind.code else ""
            parts.append(f"## {kind.status}: {name}{code}\n" + "\n".join(f"- `{text}`" for text in texts) + "\n")
    return "\n".join(parts)


def _tells(message: Message) -> bool:
    """Not those whose text is all made when it is said."""
    return message.room not in {"bench", "cli"} and len(message.shown().strip("… .:")) > 2


def endpoints_table() -> str:
    """Of all that server/app.py puts together; the vendors' APIs first."""
    app = FastAPI()
    for router in (*(router for api in server_app.APIS for router in api.routers), server_app.status.router):
        app.include_router(router)
    return endpoints_of(app.openapi())


def endpoints_of(document: Mapping[str, Mapping[str, Mapping[str, Mapping[str, object]]]]) -> str:
    """Of an OpenAPI document: one row for each path and method."""
    rows = [
        f"| `{method.upper()} {path}` | {about['summary']} |"
        for path, methods in document["paths"].items()
        for method, about in methods.items()
    ]
    return "\n".join(["| endpoint | what it is |", "|---|---|", *rows])


def metrics_table() -> str:
    rows = [
        f"| `{family.name}{'_total' if family.type == 'counter' else ''}` | {family.type} | {family.documentation} |"
        for family in Metrics().registry.collect()
    ]
    rows += [f"| `kvstrata_cache_{name}` | gauge | {what} |" for name, what in CACHE_LEVELS.items()]
    return "\n".join(["| name | kind | what it counts |", "|---|---|---|", *rows])


TABLES: Mapping[Path, Callable[[], str]] = {
    DOCS / "api.md": endpoints_table,
    DOCS / "metrics.md": metrics_table,
    DOCS / "out-of-memory.md": fits.advice_table,
    ROOT / "README.md": fits.tokens_table,
}
MADE = re.compile(r"(<!-- made: python -m tests\.docs\.make -->\n).*?(<!-- end -->)", re.DOTALL)


def with_table(text: str, table: str) -> str:
    made, count = MADE.subn(lambda found: f"{found[1]}\n{table}\n\n{found[2]}", text)
    if count != 1:
        raise ValueError("The page has no place for its table, or several")
    return made


def write_all() -> None:
    MESSAGES.write_text(messages_page(), encoding="utf-8")
    for page, table in TABLES.items():
        page.write_text(with_table(page.read_text(encoding="utf-8"), table()), encoding="utf-8")


if __name__ == "__main__":
    write_all()
