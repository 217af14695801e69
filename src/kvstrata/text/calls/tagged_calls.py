"""Calls whose parameters stand between tags, as JSON while they are written.

    <function=f><parameter=x>1</parameter></function>                Qwen3-Coder
    f<arg_key>x</arg_key><arg_value>1</arg_value>                     GLM; LongCat with a prefix of its own

Knows the tags. What a value's text means is in typed_values.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvstrata.text.calls.json_scan import SPACE
from kvstrata.text.calls.reading import CallOver, NoCall, Reading, Steps, mark, space, until
from kvstrata.text.calls.typed_values import ValueWriter, glm_writer, qwen_writer

FUNCTION = "<function="


@dataclass(frozen=True)
class Dialect:
    key: tuple[str, str]
    value: tuple[str, str]  # the first may be empty: a value follows its key
    ends: tuple[str, ...]  # of the call
    writer: Callable[[Callable[[str], None], dict[str, Any] | None], ValueWriter]


QWEN = Dialect(("<parameter=", ">"), ("", "</parameter>"), ("</function>", "</tool_call>"), qwen_writer)


def glm(prefix: str, end: str) -> Dialect:
    """Its calls end with their mark."""
    key, value = f"{prefix}arg_key>", f"{prefix}arg_value>"
    return Dialect((f"<{key}", f"</{key}"), (f"<{value}", f"</{value}"), (end,), glm_writer)


def tagged_call(reading: Reading, dialect: Dialect) -> Steps[None]:
    """At the name."""
    yield from space(reading)
    name = yield from _name(reading)
    tag = yield from _tag(reading, (dialect.key[0], *dialect.ends))
    if not tag:
        raise NoCall
    reading.begin_call(name)
    reading.arguments("{")
    try:
        is_first = True
        while tag == dialect.key[0]:
            yield from _parameter(reading, dialect, name, "" if is_first else ", ")
            is_first = False
            reading.hold()
            tag = yield from _tag(reading, (dialect.key[0], *dialect.ends))
    except NoCall:
        tag = ""
    yield from _end(reading, tag)


def _name(reading: Reading) -> Steps[str]:
    name = ""
    while (character := (yield from reading.look())) and character not in SPACE + "<>":
        name += character
        if not reading.offered.names.may_begin(name):
            raise NoCall
        reading.pos += 1
    if name not in reading.offered.names:
        raise NoCall
    if character == ">":
        reading.pos += 1
    return name


def _tag(reading: Reading, tags: tuple[str, ...]) -> Steps[str]:
    yield from space(reading)
    return (yield from mark(reading, tags))


def _parameter(reading: Reading, dialect: Dialect, name: str, comma: str) -> Steps[None]:
    """Raises NoCall where something else stands in the place of a tag; all that was read of it is held."""
    reading.drop()
    reading.hold()
    parts: list[str] = []
    if not (yield from until(reading, (dialect.key[1],), parts.append)):
        raise NoCall
    if dialect.value[0] and not (yield from _tag(reading, (dialect.value[0],))):
        raise NoCall
    reading.drop()
    key = "".join(parts).strip()
    reading.arguments(f"{comma}{json.dumps(key, ensure_ascii=False)}: ")
    writer = dialect.writer(reading.arguments, reading.offered.parameter(name, key))
    if not (yield from until(reading, (dialect.value[1],), writer.add)):
        # A value without its end is cut off, or as much of it as there will be.
        if not reading.cut_off:
            reading.end_call()
        raise CallOver
    writer.finish()


def _end(reading: Reading, tag: str) -> Steps[None]:
    if not tag and (yield from reading.look()):
        yield from reading.break_off()
    reading.drop()
    if not tag and reading.cut_off:
        raise CallOver
    reading.arguments("}")
    reading.end_call()
