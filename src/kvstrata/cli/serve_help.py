"""`kvstrata serve --help` and `--help-all`: the settings as plain text that fits a terminal of any width.

Knows how a setting is shown. Names are never cut short, as in a table, because users copy them.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic.fields import FieldInfo

from kvstrata.config import Settings, default_text, env_name, flag_name

USAGE = "Usage: kvstrata serve [OPTIONS] [MODEL]"
ABOUT = (
    "Serve a model to OpenAI's and Anthropic's clients. The first Ctrl-C lets running replies finish, the second ends "
    "at once."
)
MORE = "  --help-all               Show every setting, with its environment name."
CONFIG = (
    "--config FILE",
    "TOML file with settings (max_num_seqs = 8). Flags win over the environment, and the environment over the file",
    "config.toml in the user's configuration folder, if there is one",
    "KVSTRATA_CONFIG",
)
MOST_COLUMNS, LEAST_COLUMNS = 110, 60
FLAG_COLUMNS = 27


def short_help() -> str:
    """Return the help of common settings, a line or two for each."""
    lines = [USAGE, "", *_wrapped(ABOUT, ""), ""]
    for flag, text, default in _common():
        lines += _wrapped(f"{text}.{default}", f"  {flag}".ljust(FLAG_COLUMNS - 1) + " ")
    return "\n".join([*lines, "", MORE])


def whole_help() -> str:
    lines = [USAGE, "", *_wrapped(ABOUT, "")]
    lines += ["", *_entry(*CONFIG)]
    for panel, fields in _by_panel().items():
        lines += ["", f"{panel}:"]
        for name, field in fields.items():
            flags = "MODEL" if name == "model" else _flags(name, field)
            lines += _entry(flags, str(field.description), default_text(field), env_name(name))
    return "\n".join([*lines, "", MORE])


def _common() -> Iterator[tuple[str, str, str]]:
    for name, field in Settings.model_fields.items():
        if _extra(field)["is_common"]:
            default = default_text(field)
            shown = "" if default == "none" or field.annotation is bool else f" [default: {default}]"
            yield "MODEL" if name == "model" else _flag(name, field), _first_sentence(str(field.description)), shown
    yield CONFIG[0], _first_sentence(CONFIG[1]), ""


def _first_sentence(text: str) -> str:
    return text.partition(". ")[0]


def _entry(flags: str, text: str, default: str, environment: str) -> list[str]:
    return [f"  {flags}", *_wrapped(f"{text}. [{environment}] [default: {default}]", " " * 6)]


def _wrapped(text: str, start: str) -> list[str]:
    """Wrap a text with `start` before the first line and as many spaces before the others."""
    width = min(max(shutil.get_terminal_size().columns, LEAST_COLUMNS), MOST_COLUMNS)
    # A flag, a file or a precision is never cut in two.
    return textwrap.wrap(
        text, width, initial_indent=start, subsequent_indent=" " * len(start), break_on_hyphens=False,
        break_long_words=False,
    )  # fmt: skip


def _flag(name: str, field: FieldInfo) -> str:
    return flag_name(name) if field.annotation is bool else f"{flag_name(name)} {_unit(field)}"


def _flags(name: str, field: FieldInfo) -> str:
    return f"{_flag(name, field)}, --no-{name.replace('_', '-')}" if field.annotation is bool else _flag(name, field)


def _unit(field: FieldInfo) -> str:
    return str(_extra(field)["unit"] or "text").upper()


def _by_panel() -> dict[str, dict[str, FieldInfo]]:
    panels: dict[str, dict[str, FieldInfo]] = {}
    for name, field in Settings.model_fields.items():
        panels.setdefault(str(_extra(field)["panel"]), {})[name] = field
    return panels


def _extra(field: FieldInfo) -> Mapping[str, Any]:
    extra = field.json_schema_extra
    assert isinstance(extra, dict)
    return extra
