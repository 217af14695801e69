"""How a setting is declared, and the kinds of values that there are. Does not know which settings exist."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer
from pydantic_core import PydanticCustomError
from pydantic_settings import NoDecode

from kvstrata.errors import ConfigError
from kvstrata.sizes import Size

HOST_PATTERN = re.compile(r"[A-Za-z0-9._-]+")
ORIGIN_PATTERN = re.compile(
    r"\*|(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<host>\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::(?P<port>[0-9]{1,5}))?/?"
)
DEFAULT_PORTS = {"http": "80", "https": "443"}


def _size(value: object) -> object:
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        return value
    try:
        return Size.parse(value)
    except ConfigError as error:
        raise PydanticCustomError("size", "{reason}", {"reason": str(error)}) from None


def _absolute_bytes(value: object) -> object:
    size = _size(value)
    if not isinstance(size, Size):
        return value
    if size.num_bytes is None:
        raise PydanticCustomError("size", "a percentage makes no sense here. Write it like 32MiB")
    return size.num_bytes


def _split(value: object) -> object:
    """`a,b` as the environment has it; a list as TOML and flags have it."""
    if isinstance(value, str):
        value = value.split(",")
    if not isinstance(value, list | tuple):
        return value
    parts = tuple(part.strip() if isinstance(part, str) else part for part in value)
    if "" in parts:
        # Of keys: a user who gives one, even as a variable that is not set, wants a locked server.
        raise PydanticCustomError("empty", "given, but empty. Write a value, or leave it out")
    return parts


def _host_names(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if HOST_PATTERN.fullmatch(name) is None:
            raise PydanticCustomError("host", "write only the name, without http:// and port, like models.example.org")
    return names


def _origins(origins: tuple[str, ...]) -> tuple[str, ...]:
    """As browsers write them: lower case, no path, no port that goes without saying."""
    plain: list[str] = []
    for text in (part.strip() for origin in origins for part in origin.split(",")):
        match = ORIGIN_PATTERN.fullmatch(text.lower())
        if match is None:
            raise PydanticCustomError(
                "origin", "write scheme, host and port alone, like https://chat.example.org or http://localhost:3000, "
                "or * for every page"
            )  # fmt: skip
        scheme, host, port = match["scheme"], match["host"], match["port"]
        is_usual = DEFAULT_PORTS.get(scheme) == port
        plain.append("*" if text == "*" else f"{scheme}://{host}{'' if is_usual or not port else f':{port}'}")
    return tuple(plain)


def _whole(value: Any) -> Any:
    """Flags and the environment are text, and text is never equal to one of a list of numbers."""
    return int(value) if isinstance(value, str) and value.strip().isdecimal() else value


SizeSetting = Annotated[Size, NoDecode, BeforeValidator(_size), PlainSerializer(str)]
ByteCount = Annotated[int, BeforeValidator(_absolute_bytes)]
Bits = Annotated[Literal[8, 4, 2], BeforeValidator(_whole)]
ActivationBits = Annotated[Literal[8, 16, 32], BeforeValidator(_whole)]
GroupSize = Annotated[Literal[32, 64, 128], BeforeValidator(_whole)]
Texts = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
HostNames = Annotated[Texts, AfterValidator(_host_names)]
Origins = Annotated[Texts, AfterValidator(_origins)]
LogLevel = Literal["critical", "error", "warning", "info", "debug"]
LogFormat = Literal["text", "json"]


def setting(
    default: Any, description: str, *, panel: str, unit: str = "", is_common: bool = False, **constraints: Any
) -> Any:
    """`panel` groups the flag in --help-all, `unit` is shown as the kind of value there. `is_common`: --help has it
    too."""
    extra: dict[str, Any] = {"panel": panel, "unit": unit, "is_common": is_common}
    return Field(default, description=description, json_schema_extra=extra, **constraints)
