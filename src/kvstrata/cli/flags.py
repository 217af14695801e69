"""A command's flags, generated from Settings with default, unit and environment variable.

Knows how a field becomes an option. A flag that was not given is None, so that file and environment can decide.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Annotated, Any, TypeVar

import typer
from pydantic.fields import FieldInfo

from kvstrata.config import Settings, default_text, env_name, flag_name

Command = TypeVar("Command", bound=Callable[..., Any])


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
