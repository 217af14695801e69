"""`kvstrata bench`: measurements of this machine, each beside a fair alternative in the same run."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstrata.cli import bench_compare
from kvstrata.cli.bench_options import Json, Model, numbers, say, show, watched, words

if TYPE_CHECKING:
    from kvstrata.bench.chat_client import ChatServer
    from kvstrata.bench.load import ServeFigures, Watch
    from kvstrata.bench.quality import Quality, SampleText
    from kvstrata.bench.replay import PolicyName, ReplayRow
    from kvstrata.bench.trace import ReplayTrace
    from kvstrata.bench.workloads import Lane
    from kvstrata.models.load import LoadedModel

app = typer.Typer(
    help="Measure this machine. Each figure stands beside that of an alternative, measured in the same run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

SAMPLE = Path(__file__).parents[1] / "bench" / "sample.txt"
KV_CACHE_CODECS = ("raw", "affine:8", "planes:8", "affine:4", "planes:4", "planes:2")

Plot = Annotated[Path | None, typer.Option(help="Write a picture (PNG, SVG) here.", show_default="none")]


@app.command("kv-cache")
def kv_cache(
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model.")] = 32,
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens.")] = 512,
    heads: Annotated[int, typer.Option(min=1, help="Key heads of a layer.")] = 8,
    head_dim: Annotated[int, typer.Option(min=16, help="Values of a key.")] = 128,
    codecs: Annotated[str, typer.Option(help="Precisions, with commas between.")] = ",".join(KV_CACHE_CODECS),
    as_json: Json = False,
) -> None:
    """Measure memory, error and time of each precision on given shapes (synthetic keys with outlier channels)."""
    from kvstrata.bench.kv_cache import measure, table

    show(measure(layers, seq_len, heads, head_dim, words(codecs)), table, as_json=as_json)


@app.command()
def replay(
    traces: Annotated[
        list[Path] | None,
        typer.Argument(help="Request traces: .jsonl or .jsonl.gz with timestamp (ms) and hash_ids (512 tokens each)."),
    ] = None,
    budgets: Annotated[
        str,
        typer.Option(help="Cache sizes: shares of all distinct blocks, or sizes such as 8GiB, with commas between."),
    ] = "1%,2%,5%,10%,20%",
    bits: Annotated[str, typer.Option(help="Bits of cached blocks, with commas between.")] = "16,8,4",
    token_bytes: Annotated[
        int,
        typer.Option(min=1, help="Bytes of a token at 16 bits, for budgets that are sizes (default: an 8 B model)."),
    ] = 131072,
    held_out: Annotated[
        bool,
        typer.Option("--held-out", help="Count the second half of each trace only; the first half warms the cache."),
    ] = False,
    made_up: Annotated[int, typer.Option(min=0, help="Also replay a synthetic trace of this number of requests.")] = 0,
    policies: Annotated[
        str, typer.Option(help="Eviction policies, with commas between: kvstrata, lru, optimal.")
    ] = "kvstrata,lru,optimal",
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Compute the hit rate of request traces: kvstrata's policy, LRU, and the optimum that knows the future."""
    from kvstrata.bench import replay as figure
    from kvstrata.bench import trace as traced

    rows: list[ReplayRow] = []
    precisions = numbers(bits, 1, figure.FULL_BITS)
    chosen: list[PolicyName] = [policy for policy in figure.POLICIES if policy in policies.split(",")]
    loaded = [traced.load_trace(path) for path in traces or []] + ([traced.made_up(made_up)] if made_up else [])
    for trace in loaded:
        shares = [_share(part, trace, token_bytes) for part in budgets.split(",")]
        rows += figure.replay(trace, shares, precisions, policies=chosen, held_out=held_out, progress=say)
    if not rows:
        raise typer.BadParameter("Give a TRACE or --made-up 10000, and at least one of kvstrata, lru, optimal")
    if plot is not None:
        from kvstrata.bench.plots import plot_replay

        plot_replay(rows, plot)
    show(rows, figure.table, as_json=as_json)


def _share(text: str, trace: ReplayTrace, token_bytes: int) -> float:
    """Parse a budget as a share of the bytes that all distinct blocks take at 16 bits."""
    from kvstrata.bench.trace import BLOCK_TOKENS
    from kvstrata.sizes import Size

    size = Size.parse(text.strip())
    if size.num_bytes is None:
        return (size.percent or 0.0) / 100
    return size.num_bytes / (trace.num_distinct * BLOCK_TOKENS * token_bytes)


@app.command()
def quality(
    model: Model = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(exists=True, dir_okay=False, help="Text file; may be repeated.", show_default="a short one"),
    ] = None,
    pairs: Annotated[
        str | None, typer.Option(help="Precisions of K and V, such as planes:8/planes:4,planes:4/planes:4.")
    ] = None,
    modes: Annotated[
        str | None, typer.Option(help="Modes, with commas between: prefill, decode.", show_default="both")
    ] = None,
    context: Annotated[str | None, typer.Option(help="Tokens of context, with commas between.")] = None,
    windows: Annotated[int | None, typer.Option(min=1, help="Windows of each text.", show_default="2")] = None,
    full: Annotated[bool, typer.Option("--full", help="More windows, precisions and contexts; takes an hour.")] = False,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Measure the quality loss of each precision: KL divergence to full precision, top-1 agreement, perplexity."""
    from kvstrata.bench import quality as figure
    from kvstrata.models.load import load

    fields = _protocol_fields(pairs, modes, context, windows)
    loaded = load(model)
    texts = [_read(loaded, path) for path in text or [SAMPLE]]
    protocol = replace(figure.full_protocol(loaded, texts) if full else figure.FIRST_LOOK, **fields)
    num_passes = protocol.num_passes(len(texts))
    rows = _shown(lambda watch: figure.measure(loaded, texts, protocol, watch), num_passes, as_json)
    if plot is not None:
        from kvstrata.bench.plots import plot_quality

        plot_quality(rows, plot)
    if as_json:
        typer.echo(json.dumps([row.as_json() for row in rows]))


def _shown(measure: Callable[[Watch], Iterator[Quality]], num_passes: int, as_json: bool) -> list[Quality]:
    """Return the rows, printing each as soon as it is done unless JSON is requested."""
    rows: list[Quality] = []
    with watched(num_passes) as watch:
        measured = measure(watch)
        if as_json:
            return list(measured)
        print(QUALITY_HEAD, flush=True)
        for row in measured:
            rows.append(row)
            print(_quality_line(row), flush=True)
    return rows


def _protocol_fields(pairs: str | None, modes: str | None, context: str | None, windows: int | None) -> dict[str, Any]:
    """Return the given fields of a protocol. Bad values are refused before a model is loaded."""
    from kvstrata.bench.quality import MODES, parse_pairs

    fields: dict[str, Any] = {}
    if pairs is not None:
        fields["pairs"] = parse_pairs(pairs)
    if modes is not None:
        fields["modes"] = tuple(word.strip() for word in modes.split(","))
        if not set(fields["modes"]) <= set(MODES):
            raise typer.BadParameter(f"--modes '{modes}' is not of {', '.join(MODES)}")
    if context is not None:
        fields["contexts"] = numbers(context, smallest=8)
    if windows is not None:
        fields["windows"] = windows
    return fields


def _read(loaded: LoadedModel, path: Path) -> SampleText:
    from kvstrata.bench.quality import SampleText
    from kvstrata.text.tokenizer import encode_prompt

    return SampleText(path.stem, encode_prompt(loaded.tokenizer, path.read_text(encoding="utf-8")))


QUALITY_HEAD = (
    f"{'text':<18}{'mode':<9}{'context':>8}  {'K':<10}{'V':<10}{'bits':>6}{'KL mean':>10}{'median':>10}{'99.9 %':>10}"
    f"{'same top-1':>12}{'of a window':>13}{'perplexity':>12}"
)


def _quality_line(row: Quality) -> str:
    line = f"{row.text[:17]:<18}{row.mode:<9}{row.context:>8}  {row.k:<10}{row.v:<10}{row.bits_per_value:>6.2f}"
    line += f"{row.kl_mean:>10.5f}{row.kl_median:>10.5f}{row.kl_p999:>10.4f}"
    return line + f"{row.top1:>12.3f}{row.top1_min:>13.3f}{row.ppl:>12.2f}"


LOADS = "multi-turn,shared-system,alternating,agents"
CALIBRATION_REPEATS = 2


@app.command()
def serve(
    url: Annotated[str, typer.Argument(help="The server, such as http://127.0.0.1:8000.")],
    load: Annotated[str, typer.Option(help="Loads, with commas between.")] = LOADS,
    trace: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="Replay a trace instead: Mooncake's JSON lines (timestamp, output_length, hash_ids), may be gzipped.",
        ),
    ] = None,
    chats: Annotated[int, typer.Option(min=1, help="Chats of each load.")] = 4,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each chat.")] = 6,
    system_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a system prompt.")] = 400,
    turn_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each turn.")] = 120,
    reply_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each reply, at most.")] = 32,
    clients: Annotated[
        int, typer.Option(min=1, help="Concurrent chats. Cached tokens of all requests can be inferred with 1 only.")
    ] = 1,
    requests: Annotated[int, typer.Option(min=1, help="Requests of a trace, at most.")] = 100,
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens of text for each block of the trace.")] = 512,
    speed: Annotated[float, typer.Option(min=0.001, help="Speed-up of a trace.")] = 1.0,
    model: Annotated[
        str | None,
        typer.Option(help="Name of the model on the server.", show_default="the first that the server lists"),
    ] = None,
    api_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="Sent as a bearer token.")] = "none",
    calibrate: Annotated[
        bool, typer.Option(help="Time unseen prompts first, so that cached tokens can be inferred from times.")
    ] = True,
    seed: Annotated[
        int, typer.Option(help="Seed of the texts; -1: a new one. A server that saw it before has the texts cached.")
    ] = -1,
    as_json: Json = False,
) -> None:
    """Measure any OpenAI-compatible server under a load: TTFT, time between tokens, cached tokens."""
    from kvstrata.bench import workloads
    from kvstrata.bench.chat_client import ChatServer
    from kvstrata.bench.load import table
    from kvstrata.bench.trace import load_trace

    chosen = words(load)
    if unknown := [name for name in chosen if name not in workloads.LOADS]:
        raise typer.BadParameter(f"'{unknown[0]}' is none of {LOADS}", param_hint="--load")
    seed = seed if seed >= 0 else time.time_ns() % 1_000_000
    if trace is not None:
        lanes = workloads.from_trace(
            load_trace(trace), block_tokens=block_tokens, speed=speed, max_requests=requests, reply_tokens=reply_tokens
        )
        loads, clients = {trace.name: lanes}, 0
    else:
        shape = workloads.LoadShape(chats, turns, system_tokens, turn_tokens, reply_tokens, seed)
        loads = {name: workloads.LOADS[name](replace(shape, seed=seed + 10 * i)) for i, name in enumerate(chosen)}
    server = ChatServer(url.rstrip("/").removesuffix("/v1"), model or "", api_key)
    found = asyncio.run(_measured(server, loads, clients, f"calibrate {seed}" if calibrate else ""))
    show(found, table, as_json=as_json)


async def _measured(server: ChatServer, loads: dict[str, list[Lane]], clients: int, key: str) -> list[ServeFigures]:
    """Measure the loads. `key` makes the calibration prompts unseen; if it is empty, no calibration runs."""
    import httpx

    from kvstrata.bench.chat_client import first_model
    from kvstrata.bench.load import CALIBRATION_TOKENS, measure
    from kvstrata.bench.load import calibrate as time_unseen
    from kvstrata.errors import KvstrataError

    try:
        server = replace(server, model=server.model or await first_model(server))
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError) as error:
        raise KvstrataError(
            f"No OpenAI-compatible server answers at {server.url}: {error}. Start one, or name another address"
        ) from None
    unseen = len(CALIBRATION_TOKENS) * CALIBRATION_REPEATS if key else 0
    with watched(unseen + sum(len(lane) for lanes in loads.values() for lane in lanes)) as watch:
        watch.say("unseen prompts")
        known = await time_unseen(server, key, CALIBRATION_TOKENS, CALIBRATION_REPEATS, watch) if key else None
        return [await measure(server, name, lanes, clients, known, watch) for name, lanes in loads.items()]


app.command()(bench_compare.compare)
