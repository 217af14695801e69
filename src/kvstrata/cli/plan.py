"""`kvstrata plan`: the KV of a model that fits into a machine's memory, computed before anything is loaded.

Knows how the result is shown. models/outline.py reads the headers, engine/memory_plan.py does the arithmetic.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kvstrata.errors import ConfigError, ModelError
from kvstrata.sizes import Size, format_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from kvstrata.engine.memory_plan import Forecast, PrecisionForecast
    from kvstrata.models.outline import ModelOutline
    from kvstrata.platform.device import MlxBackend

Backend = Literal["metal", "cuda", "cpu"]
DEFAULT_LIMIT = "75%"
WANTED_TOKENS = 32768
WANTED_CONVERSATIONS = 4
# Metal's recommended working set was two thirds of the memory on smaller Macs, three quarters on others.
LARGE_MAC_BYTES = 36 * 1000**3
SMALL_MAC_SHARE, LARGE_MAC_SHARE = 2 / 3, 3 / 4


@dataclass(frozen=True)
class Place:
    """The machine to plan for."""

    backend: MlxBackend
    memory_bytes: int
    working_set_bytes: int  # largest part of it that a process should use


def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Folder, GGUF file, or a Hugging Face id that was pulled.",
            show_default="the default model, SmolLM2-135M-Instruct",
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help="Memory of the machine (of the GPU, where it has its own), like 36GiB.",
            metavar="size",
            show_default="this machine's",
        ),
    ] = None,
    memory_limit: Annotated[
        str, typer.Option(help="Memory for kvstrata, as --memory-limit of serve.", metavar="size")
    ] = DEFAULT_LIMIT,
    disk: Annotated[
        str | None,
        typer.Option(help="Disk cache to plan with, like 50GiB.", metavar="size", show_default="none"),
    ] = None,
    backend: Annotated[
        Backend | None, typer.Option(help="Back-end of the machine.", show_default="as this machine")
    ] = None,
    precision: Annotated[
        list[str] | None,
        typer.Option(
            help="Precision to show, keys and values alike (planes:2) or apart (planes:8/planes:4); may be repeated.",
            metavar="precision",
            show_default="raw, planes:8, planes:8/planes:4, planes:4",
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option(help="Length of a conversation that the advice is for, at most the context.", min=1)
    ] = WANTED_TOKENS,
    conversations: Annotated[
        int, typer.Option(help="Number of such conversations that should stay in memory.", min=1)
    ] = WANTED_CONVERSATIONS,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON value on stdout and nothing else.")] = False,
) -> None:
    """Show a model's memory and how much KV fits, from its headers and config: nothing is loaded or downloaded."""
    sizes = {"--memory": memory, "--memory-limit": memory_limit, "--disk": disk}
    parsed = {flag: _size(flag, text) for flag, text in sizes.items()}
    place = _place(backend, parsed["--memory"])
    limit = parsed["--memory-limit"]
    assert limit is not None
    asked = PlanRequest(
        model, place, limit, _bytes("--disk", parsed["--disk"]), _pairs(precision), tokens, conversations
    )
    shown = _plan(asked)
    if as_json:
        typer.echo(json.dumps(_plain(asked, shown), indent=2))
    else:
        _show(asked, shown)


@dataclass(frozen=True)
class PlanRequest:
    model: str | None
    place: Place
    limit: Size
    disk_bytes: int | None
    precisions: tuple[tuple[str, str], ...] | None
    tokens: int
    conversations: int

    @property
    def limit_bytes(self) -> int:
        return self.limit.of(self.place.memory_bytes, self.place.working_set_bytes)


@dataclass(frozen=True)
class PlanResult:
    outline: ModelOutline
    forecast: Forecast
    advice: PrecisionForecast | None
    tokens: int  # length of the conversation that the advice assumes
    command: str
    notes: tuple[str, ...]


def _plan(asked: PlanRequest) -> PlanResult:
    from kvstrata.engine.memory_plan import LENGTHS, PRECISIONS, advise, forecast
    from kvstrata.models.outline import outline

    found = outline(asked.model, asked.place.backend, limit_bytes=asked.limit_bytes)
    if found.weight_bytes >= asked.limit_bytes:
        raise ModelError(
            f"The weights of {found.name} take {format_bytes(found.weight_bytes)}, and the memory limit is "
            f"{format_bytes(asked.limit_bytes)} ({asked.limit} of {format_bytes(asked.place.memory_bytes)}). Choose a "
            "smaller model or fewer bits, or give a larger --memory or --memory-limit"
        )
    tokens = min(asked.tokens, found.context_tokens)
    result = forecast(
        found,
        asked.limit_bytes,
        disk_bytes=asked.disk_bytes,
        precisions=asked.precisions or PRECISIONS,
        lengths=sorted({*LENGTHS, tokens}),
    )
    advice = advise(result, tokens=tokens, conversations=asked.conversations)
    best = advice or (result.precisions[-1] if result.precisions else None)
    return PlanResult(found, result, advice, tokens, _command(asked, best, tokens), tuple(_notes(found, result)))


def _command(asked: PlanRequest, row: PrecisionForecast | None, tokens: int) -> str:
    from kvstrata.engine.memory_plan import needs_live

    words = ["kvstrata", "serve", *([asked.model] if asked.model else [])]
    if str(asked.limit) != DEFAULT_LIMIT:
        words += ["--memory-limit", str(asked.limit)]
    if row is not None:
        words += row.flags
        if needs_live(row, tokens):
            words.append("--kv-cache-live")
    line = shlex.join(words)
    if asked.disk_bytes is not None:
        # Not quoted: the shell has to read the tilde.
        line += f" --disk-cache-dir ~/.cache/kvstrata/kv --disk-cache-size {format_bytes(asked.disk_bytes)}"
    return line


def _notes(found: ModelOutline, result: Forecast) -> list[str]:
    notes = [
        "What passes take is expected here and measured when a server starts: `memory` of GET /props has the figures.",
    ]
    if any(spec.kind == "foreign" for spec in found.layout.flat()):
        notes.append("This model keeps caches of its own kind: requests run one by one and share nothing.")
    elif result.checkpoint_bytes:
        notes.append(
            f"A stored conversation keeps up to {result.max_checkpoints} points to resume at, "
            f"{format_bytes(result.checkpoint_bytes)} each at full precision. They are counted."
        )
    if len(result.precisions) > 1:
        notes.append(
            "Running requests are kept at full precision unless --kv-cache-live is set. --dynamic-cache starts there "
            "and steps down to planes:4 as memory fills up."
        )
    return [*notes, *(f"Left out: {reason}" for reason in result.unsupported)]


def _size(flag: str, text: str | None) -> Size | None:
    if text is None:
        return None
    try:
        return Size.parse(text)
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error}") from None


def _bytes(flag: str, size: Size | None) -> int | None:
    if size is not None and not size.num_bytes:
        raise ConfigError(f"{flag}: a percentage or nothing makes no sense here. Write it like 36GiB.")
    return size.num_bytes if size is not None else None


def _pairs(names: list[str] | None) -> tuple[tuple[str, str], ...] | None:
    if not names:
        return None
    split = [name.partition("/") for name in names]
    return tuple((k.strip(), v.strip() or k.strip()) for k, _, v in split)


def _place(backend: Backend | None, memory: Size | None) -> Place:
    from kvstrata.platform.device import device

    asked_bytes = _bytes("--memory", memory)
    here = device()
    chosen = backend or here.backend
    size = asked_bytes or here.memory_bytes
    if chosen == here.backend and size == here.memory_bytes:
        return Place(chosen, size, here.working_set_bytes)
    share = SMALL_MAC_SHARE if size < LARGE_MAC_BYTES else LARGE_MAC_SHARE
    return Place(chosen, size, int(size * share) if chosen == "metal" else size)


def _plain(asked: PlanRequest, shown: PlanResult) -> dict[str, Any]:
    found, result = shown.outline, shown.forecast
    return {
        "model": found.name,
        "backend": asked.place.backend,
        "memory_bytes": asked.place.memory_bytes,
        "memory_limit_bytes": asked.limit_bytes,
        "weights": {"bytes": found.weight_bytes, "file_bytes": found.file_bytes, "form": found.weights or "as stored"},
        "context_tokens": found.context_tokens,
        "layers": found.layout.count_by_kind(),
        "kv": {
            "dtype": found.dtype,
            "bytes_per_token": result.token_bytes,
            "bytes_per_sequence": result.sequence_bytes,
            "bytes_per_mark": result.checkpoint_bytes,
            "marks": result.max_checkpoints if result.checkpoint_bytes else 0,
        },
        "memory": asdict(result.memory),
        "precisions": [_plain_precision(row) for row in result.precisions],
        "refused": list(result.unsupported),
        "advice": {
            "tokens": shown.tokens,
            "conversations": asked.conversations,
            "fits": shown.advice is not None,
            "command": shown.command,
        },
        "notes": list(shown.notes),
    }


def _plain_precision(row: PrecisionForecast) -> dict[str, Any]:
    return {
        "k": row.k,
        "v": row.v,
        "token_bytes": row.token_bytes,
        "kv_bytes": row.kv_bytes,
        "tokens": row.max_cached_tokens,
        "longest_tokens": row.max_request_tokens,
        "longest_live_tokens": row.max_live_request_tokens,
        "stored": [asdict(each) for each in row.capacities],
        "flags": row.flags,
    }


def _show(asked: PlanRequest, shown: PlanResult) -> None:
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    for name, line in _facts(asked, shown):
        console.print(f"{name:<10}{line}")
    console.print(_table(shown.forecast, has_disk=asked.disk_bytes is not None))
    console.print(f"{_legend(shown.forecast, has_disk=asked.disk_bytes is not None)}\n", style="dim")
    console.print(_advice(asked, shown), soft_wrap=True)
    console.print(f"  {shown.command}", style="bold", soft_wrap=True)
    for note in shown.notes:
        console.print(note, style="dim", soft_wrap=True)


def _facts(asked: PlanRequest, shown: PlanResult) -> list[tuple[str, str]]:
    found, shares = shown.outline, shown.forecast.memory
    kinds = ", ".join(f"{count} {kind}" for kind, count in found.layout.count_by_kind().items())
    form = f"; {found.weights}" if found.weights else ""
    limit, memory = format_bytes(asked.limit_bytes), format_bytes(asked.place.memory_bytes)
    working = shares.scratch_bytes + shares.allocator_cache_bytes + shares.spare_bytes
    sequence = shown.forecast.sequence_bytes
    fixed = f", {format_bytes(sequence)} for each running request" if sequence else ""
    return [
        ("model", f"{found.name}, context {found.context_tokens:,} tokens, layers: {kinds}"),
        ("weights", f"{format_bytes(found.weight_bytes)} ({format_bytes(found.file_bytes)} on the disk{form})"),
        ("KV", f"{format_bytes(shown.forecast.token_bytes)} for each token in {found.dtype}{fixed}"),
        (
            "memory",
            f"{limit} of {memory} ({asked.place.backend}); {format_bytes(working)} of it for passes and reserve",
        ),
    ]


def _table(result: Forecast, *, has_disk: bool) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    lengths = [each.tokens for each in result.precisions[0].capacities] if result.precisions else []
    shows_live = any(row.max_live_request_tokens != row.max_request_tokens for row in result.precisions)
    names = ["K and V", "token", "tokens", "longest", *(["live"] if shows_live else [])]
    for tokens in lengths:
        names += [f"{_short(tokens)} chats", "on disk" if has_disk else "disk each"]
    for i, name in enumerate(names):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    for row in result.precisions:
        cells = [
            row.name,
            format_bytes(round(row.token_bytes)),
            "any" if row.max_cached_tokens is None else _short(row.max_cached_tokens),
        ]
        cells += [_short(row.max_request_tokens), *([_short(row.max_live_request_tokens)] if shows_live else [])]
        for each in row.capacities:
            on_disk = f"{each.disk_conversations:,}" if has_disk else format_bytes(each.disk_bytes)
            cells += [f"{each.conversations:,}", on_disk]
        table.add_row(*cells)
    return table


def _legend(result: Forecast, *, has_disk: bool) -> str:
    shows_live = any(row.max_live_request_tokens != row.max_request_tokens for row in result.precisions)
    live = "; live: with --kv-cache-live" if shows_live else ""
    disk = "how many the disk has room for" if has_disk else "what one takes on a disk"
    return (
        f"token: bytes of one. tokens: stored, in memory. longest: one request that runs{live}. "
        f"chats: stored conversations of that length in memory, and {disk}."
    )


def _advice(asked: PlanRequest, shown: PlanResult) -> str:
    wanted = f"{asked.conversations} conversation{'s' * (asked.conversations > 1)} of {shown.tokens:,} tokens"
    if shown.advice is None:
        return (
            f"{wanted} do not stay in memory at any of these precisions: the coldest will be evicted, or rest on a "
            "disk (--disk). The lowest one:"
        )
    fit = next(each.conversations for each in shown.advice.capacities if each.tokens == shown.tokens)
    return f"{wanted} (--conversations, --tokens) stay in memory at {shown.advice.name}, which has room for {fit:,}:"


def _short(tokens: int) -> str:
    """Format a token count as contexts are named: 8192 is 8k."""
    if tokens < 1024:
        return str(tokens)
    return f"{tokens // 1024}k" if tokens < 10 << 20 else f"{tokens >> 20}M"
