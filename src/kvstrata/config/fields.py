"""Declaration of a setting: its names as a flag and in the environment, and the types of values."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer
from pydantic_core import PydanticCustomError
from pydantic_settings import NoDecode

from kvstrata.errors import ConfigError
from kvstrata.sizes import Size

ENV_PREFIX = "KVSTRATA_"
LINK_PATTERN = re.compile(r"(?:tcp|udp|sctp)://", re.IGNORECASE)
NOT_A_KEY = "an API key must be printable ASCII without spaces"
HOST_PATTERN = re.compile(r"[A-Za-z0-9._-]+")
ORIGIN_PATTERN = re.compile(
    r"\*|(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<host>\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::(?P<port>[0-9]{1,5}))?/?"
)
DEFAULT_PORTS = {"http": "80", "https": "443"}


def flag_name(setting: str) -> str:
    return "--" + setting.replace("_", "-")


def env_name(setting: str) -> str:
    return ENV_PREFIX + setting.upper()


def is_service_link(name: str, value: str | None) -> bool:
    """Return whether Kubernetes set a variable: for a service called kvstrata it sets KVSTRATA_PORT=tcp://10.0.0.1:8000
    in every container, as Docker did for links. The other variables of such a service (KVSTRATA_SERVICE_HOST,
    KVSTRATA_PORT_8000_TCP) are not names of settings."""
    return name.upper() == env_name("port") and LINK_PATTERN.match(value or "") is not None


def is_key(text: str) -> bool:
    return bool(text) and text.isascii() and text.isprintable() and " " not in text


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
    """Return the parts of `a,b`, as in the environment, or of a list, as in TOML and flags."""
    if isinstance(value, str):
        value = value.split(",")
    if not isinstance(value, list | tuple):
        return value
    parts = tuple(part.strip() if isinstance(part, str) else part for part in value)
    if "" in parts:
        # A user who gives a key, even by an empty shell variable, wants a server with keys.
        raise PydanticCustomError("empty", "given, but empty. Write a value, or leave it out")
    return parts


def _host_names(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if HOST_PATTERN.fullmatch(name) is None:
            raise PydanticCustomError("host", "write only the name, without http:// and port, like models.example.org")
    return names


def _origins(origins: tuple[str, ...]) -> tuple[str, ...]:
    """Return origins as browsers write them: lower case, no path, no default port."""
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
    """Return text of digits as a number: flags and the environment are text, which is never equal to a number."""
    return int(value) if isinstance(value, str) and value.strip().isdecimal() else value


SizeSetting = Annotated[Size, NoDecode, BeforeValidator(_size), PlainSerializer(str)]

ByteCount = Annotated[int, BeforeValidator(_absolute_bytes)]

Bits = Annotated[Literal[8, 4, 2], BeforeValidator(_whole)]

ActivationBits = Annotated[Literal[8, 16, 32], BeforeValidator(_whole)]

Texts = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]

HostNames = Annotated[Texts, AfterValidator(_host_names)]

Origins = Annotated[Texts, AfterValidator(_origins)]

LogLevel = Literal["critical", "error", "warning", "info", "debug"]

LogFormat = Literal["text", "json"]


def setting(
    default: Any, description: str, *, panel: str, unit: str = "", is_common: bool = False, **constraints: Any
) -> Any:
    """Declare a setting. `panel` groups its flag in --help-all, `unit` is the kind of value shown there. `is_common`
    adds it to --help."""
    extra: dict[str, Any] = {"panel": panel, "unit": unit, "is_common": is_common}
    return Field(default, description=description, json_schema_extra=extra, **constraints)
