"""`kvstrata bench serve`: a load against a server that is running, ours or another one."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvstrata.cli.bench_options import Json, show, words

if TYPE_CHECKING:
    from kvstrata.bench.chat_client import Door
    from kvstrata.bench.chats import Lane
    from kvstrata.bench.serve_load import ServeFigures

LOADS = "multi-turn,shared-system,alternating,agents"
CALIBRATION_REPEATS = 2


def serve(
    url: Annotated[str, typer.Argument(help="The server, such as http://127.0.0.1:8000.")],
    load: Annotated[str, typer.Option(help="Which loads, with commas between.")] = LOADS,
    trace: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="Replay this instead: Mooncake's JSON lines (timestamp, output_length, hash_ids), maybe gzipped.",
        ),
    ] = None,
    chats: Annotated[int, typer.Option(min=1, help="Chats of each load.")] = 4,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each chat.")] = 6,
    system_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a system prompt.")] = 400,
    turn_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each turn.")] = 120,
    reply_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of each reply.")] = 32,
    clients: Annotated[int, typer.Option(min=1, help="Chats at once. Only 1 lets all cached tokens be inferred.")] = 1,
    requests: Annotated[int, typer.Option(min=1, help="Most requests of a trace.")] = 100,
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens that a block of the trace becomes.")] = 512,
    speed: Annotated[float, typer.Option(min=0.001, help="How much faster than it was to replay a trace.")] = 1.0,
    model: Annotated[
        str | None, typer.Option(help="Its name on the server.", show_default="the first that the server lists")
    ] = None,
    api_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="Sent as a bearer token.")] = "none",
    calibrate: Annotated[
        bool, typer.Option(help="Time unseen prompts first, so that cached tokens can be told from time.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Other texts. A server that saw this seed before has them cached.")] = -1,
    as_json: Json = False,
) -> None:
    """A load against any OpenAI-compatible server: time to first token, between tokens, and what was cached."""
    from kvstrata.bench import chats as asked
    from kvstrata.bench.chat_client import Door
    from kvstrata.bench.serve_load import table
    from kvstrata.bench.trace import load_trace

    chosen = words(load)
    if unknown := [name for name in chosen if name not in asked.LOADS]:
        raise typer.BadParameter(f"'{unknown[0]}' is none of {LOADS}", param_hint="--load")
    seed = seed if seed >= 0 else time.time_ns() % 1_000_000
    if trace is not None:
        lanes = asked.from_trace(
            load_trace(trace), block_tokens=block_tokens, speed=speed, max_requests=requests, reply_tokens=reply_tokens
        )
        loads, clients = {trace.name: lanes}, 0
    else:
        shape = asked.Shape(chats, turns, system_tokens, turn_tokens, reply_tokens, seed)
        loads = {name: asked.LOADS[name](replace(shape, seed=seed + 10 * i)) for i, name in enumerate(chosen)}
    door = Door(url.rstrip("/").removesuffix("/v1"), model or "", api_key)
    found = asyncio.run(_measured(door, loads, clients, f"calibrate {seed}" if calibrate else ""))
    show(found, table, as_json=as_json)


async def _measured(door: Door, loads: dict[str, list[Lane]], clients: int, key: str) -> list[ServeFigures]:
    """`key`: of the unseen prompts; empty: none are timed."""
    import httpx

    from kvstrata.bench.chat_client import first_model
    from kvstrata.bench.serve_load import CALIBRATION_TOKENS, measure
    from kvstrata.bench.serve_load import calibrate as time_unseen
    from kvstrata.cli.bench_progress import watched
    from kvstrata.errors import KvstrataError

    try:
        door = replace(door, model=door.model or await first_model(door))
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError) as error:
        raise KvstrataError(
            f"No OpenAI-compatible server answers at {door.url}: {error}. Start one, or name another address"
        ) from None
    unseen = len(CALIBRATION_TOKENS) * CALIBRATION_REPEATS if key else 0
    with watched(unseen + sum(len(lane) for lanes in loads.values() for lane in lanes)) as watch:
        watch.say("unseen prompts")
        known = await time_unseen(door, key, CALIBRATION_TOKENS, CALIBRATION_REPEATS, watch) if key else None
        return [await measure(door, name, lanes, clients, known, watch) for name, lanes in loads.items()]
