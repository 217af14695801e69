"""Options and help texts made from `Settings`: flags with default, unit and environment variable; `serve --help`.

A flag that was not given is None, so that file and environment can decide. Help is plain text that fits a terminal of
any width; names are never cut short, as in a table, because users copy them.
"""

from __future__ import annotations

import inspect
import shutil
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, TypeVar

import typer
from pydantic.fields import FieldInfo

from kvstrata.config import Settings, default_text, env_name, flag_name

Command = TypeVar("Command", bound=Callable[..., Any])
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


def with_settings(*, without: Iterable[str] = ()) -> Callable[[Command], Command]:
    """Add an option for every setting but those in `without` to a command that takes them as **flags."""
    names = [name for name in Settings.model_fields if name not in set(without)]

    def add(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        options = [_parameter(name, Settings.model_fields[name]) for name in names]
        command.__signature__ = signature.replace(parameters=[*own, *options])  # pyright: ignore
        return command

    return add


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    extra = field.json_schema_extra
    assert isinstance(extra, dict)
    declarations = [flag_name(name)]
    if field.annotation is bool:
        declarations = [f"{flag_name(name)}/--no-{name.replace('_', '-')}"]
    option = typer.Option(
        *declarations,
        help=f"{field.description}.",
        envvar=env_name(name),  # for --help: Settings reads it
        show_default=default_text(field),
        metavar=None if field.annotation is bool else str(extra["unit"] or "text"),
        rich_help_panel=str(extra["panel"]),
    )
    # Values stay text here: Settings validates them all and reports every problem at once.
    kind: Any = {bool: bool | None, tuple[str, ...]: list[str] | None}.get(field.annotation, str | None)  # pyright: ignore
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword_only, default=None, annotation=Annotated[kind, option])


def given(context: typer.Context, flags: dict[str, Any]) -> dict[str, Any]:
    """Return the flags given on the command line. Settings reads the environment itself and splits lists at commas."""
    sources = {name: context.get_parameter_source(name) for name in flags}
    return {name: flags[name] for name, source in sources.items() if source and source.name == "COMMANDLINE"}


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
