"""Commands of `kvstrata bench` about the cache and how it serves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvstrata.cli.bench_options import Json, Model, RandomWeights, Rounds, chosen, numbers, say, show, words


def first_token(
    model: Model = None,
    prompt_tokens: Annotated[int, typer.Option(min=64, help="Tokens of the prompt.")] = 4000,
    precision: Annotated[str, typer.Option(help="What KV is stored as: raw, planes:8 and so on.")] = "raw",
    slow_disk: Annotated[
        str, typer.Option(help="What slow disks read in a second, with commas between.", metavar="sizes")
    ] = "2MB,20MB",
    rounds: Rounds = 3,
    as_json: Json = False,
) -> None:
    """How soon the first token comes: without a cache, with one that has nothing, from memory, and from disks."""
    from kvstrata.bench.first_token import Load, measure, table
    from kvstrata.models.load import load
    from kvstrata.sizes import Size

    what = Load(prompt_tokens, precision, [Size.parse(speed).of(0) for speed in words(slow_disk)])
    show(measure(load(model), what, rounds=rounds, progress=say), table, as_json=as_json)


def spilling(
    model: Model = None,
    streams: Annotated[int, typer.Option(min=1, max=16, help="Streams that run meanwhile.")] = 4,
    conversations: Annotated[int, typer.Option(min=1, help="Conversations that are spilled in each round.")] = 8,
    conversation_tokens: Annotated[int, typer.Option(min=16, help="Tokens of each.")] = 512,
    precision: Annotated[str, typer.Option(help="What KV is stored as: raw, planes:8 and so on.")] = "raw",
    rounds: Annotated[int, typer.Option(min=1, help="Windows of spilling, and as many without.")] = 12,
    as_json: Json = False,
) -> None:
    """What spilling to the disk does to running streams: time between two tokens with it and without."""
    from kvstrata.bench.spilling import Load, measure, table
    from kvstrata.models.load import load

    what = Load(streams, conversations, conversation_tokens, precision)
    show(measure(load(model), what, rounds=rounds, progress=say), table, as_json=as_json)


def disk(
    directory: Annotated[
        Path, typer.Option(exists=True, file_okay=False, help="A folder on the disk that is asked about.")
    ] = Path(),
    blocks: Annotated[int, typer.Option(min=1, help="Blocks of a conversation.")] = 32,
    block_size: Annotated[str, typer.Option(help="Bytes of each, such as 8MiB.", metavar="size")] = "8MiB",
    rounds: Rounds = 5,
    as_json: Json = False,
) -> None:
    """How fast blocks get to a disk and back, beside a plain file with as many bytes."""
    from kvstrata.bench.disk import measure, table
    from kvstrata.sizes import Size

    nbytes = Size.parse(block_size).of(0)
    if nbytes < 1:
        raise typer.BadParameter(f"{block_size} is not a number of bytes, such as 8MiB", param_hint="--block-size")
    show(measure(directory, blocks, nbytes, rounds, progress=say), table, as_json=as_json)


def memory(
    tokens: Annotated[int, typer.Option(min=256, help="How far a sequence grows.")] = 4096, as_json: Json = False
) -> None:
    """Peak against held memory while caches grow, join and leave: ours beside mlx-lm's."""
    from kvstrata.bench.memory import measure, table

    show(measure(tokens, progress=say), table, as_json=as_json)


def decode(
    model: Model = None,
    context_tokens: Annotated[int, typer.Option(min=256, help="Tokens that are attended to.")] = 4096,
    reply_tokens: Annotated[int, typer.Option(min=2, help="Tokens decoded in each round.")] = 16,
    rounds: Rounds = 3,
    precisions: Annotated[str, typer.Option(help="Of ours, with commas between.")] = "raw,planes:8,planes:4",
    random_weights: RandomWeights = False,
    as_json: Json = False,
) -> None:
    """Decoding over a long context: each precision, beside mlx-lm's plain and quantized caches."""
    from kvstrata.bench.decode import measure, table

    rows = measure(
        chosen(model, random_weights=random_weights),
        context_tokens=context_tokens,
        reply_tokens=reply_tokens,
        rounds=rounds,
        precisions=words(precisions),
        progress=say,
    )
    show(rows, table, as_json=as_json)


def requantize(
    model: Model = None,
    streams: Annotated[int, typer.Option(min=1, max=16, help="Streams that run meanwhile.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=300, help="Tokens of each prompt.")] = 512,
    reply_tokens: Annotated[int, typer.Option(min=64, help="Tokens of each reply.")] = 160,
    random_weights: RandomWeights = False,
    as_json: Json = False,
) -> None:
    """Step everything down to planes:8, then planes:4, under running streams: pauses, bytes, time."""
    from kvstrata.bench.requantize import measure, table

    loaded = chosen(model, random_weights=random_weights)
    rows = measure(loaded, streams=streams, prompt_tokens=prompt_tokens, reply_tokens=reply_tokens)
    show(rows, table, as_json=as_json)


def ladder(
    model: Model = None,
    chats: Annotated[int, typer.Option(min=2, help="Conversations that come and come back.")] = 12,
    turns: Annotated[int, typer.Option(min=2, help="Turns of each.")] = 3,
    turn_tokens: Annotated[int, typer.Option(min=16, help="Tokens that a turn adds.")] = 192,
    reply_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each reply.")] = 24,
    at_once: Annotated[int, typer.Option(min=1, max=16, help="Requests that run together.")] = 2,
    share: Annotated[
        float, typer.Option(min=0.05, max=1.0, help="KV budget, of what the load needs at full precision.")
    ] = 0.25,
    as_json: Json = False,
) -> None:
    """A load that does not fit: stepping down beside evicting at full precision. Hit rates, failures, memory."""
    from kvstrata.bench.ladder import Load, measure, table
    from kvstrata.models.load import load

    what = Load(chats, turns, turn_tokens, reply_tokens, at_once)
    show(measure(load(model), what, share=share, progress=say), table, as_json=as_json)


def graph(
    tokens: Annotated[
        str, typer.Option(help="Tokens that are attended to, with commas between.", metavar="tokens")
    ] = "1024,8192,32768",
    as_json: Json = False,
) -> None:
    """What one attention layer of a decode step asks of a Mac's GPU: operations, and bytes that they move."""
    from kvstrata.bench.graph import measure, table

    show(measure(numbers(tokens, 1)), table, as_json=as_json)


def codecs(
    tokens: Annotated[int, typer.Option(min=64, help="Tokens that are encoded and decoded at once.")] = 8192,
    rounds: Rounds = 5,
    sixteen: Annotated[bool, typer.Option("--bf16/--float32", help="What the vectors are stored as before.")] = True,
    as_json: Json = False,
) -> None:
    """How fast each precision is written and read, in GB/s, beside a plain copy."""
    import mlx.core as mx

    from kvstrata.bench.codecs import measure, table

    dtype = mx.bfloat16 if sixteen else mx.float32
    show(measure(tokens, rounds, dtype, progress=say), table, as_json=as_json)


def prefill_share(
    model: Model = None,
    shares: Annotated[
        str, typer.Option(help="Values of --prefill-share, with commas between.", metavar="shares")
    ] = "0.1,0.25,0.5,0.75,1",
    streams: Annotated[int, typer.Option(min=1, max=15, help="Streams that run when the prompt comes.")] = 1,
    prompt_tokens: Annotated[int, typer.Option(min=64, help="Tokens of the prompt.")] = 3000,
    random_weights: RandomWeights = False,
    as_json: Json = False,
) -> None:
    """A long prompt beside running streams: how much slower their tokens come, how much later its first one."""
    from kvstrata.bench.prefill_share import measure, table

    loaded = chosen(model, random_weights=random_weights)
    rows = measure(loaded, shares=_shares(shares), streams=streams, prompt_tokens=prompt_tokens, progress=say)
    show(rows, table, as_json=as_json)


def _shares(text: str) -> list[float]:
    try:
        shares = [float(share) for share in text.split(",")]
    except ValueError:
        shares = []
    if not shares or not all(0 < share <= 1 for share in shares):
        raise typer.BadParameter("Give shares above 0 and up to 1, with commas between, as in 0.25,0.5,1.")
    return shares
