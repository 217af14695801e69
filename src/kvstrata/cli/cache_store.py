"""`kvstrata cache ls|verify --remote`, and `doctor`'s check of a remote store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvstrata.errors import KvstrataError

if TYPE_CHECKING:
    from kvstrata.tiers.remote.block_store import MeasuredStore
    from kvstrata.tiers.remote.store import KeyValueStore

Remote = Annotated[
    str | None,
    typer.Option(
        "--remote",
        help="A store that servers share, as --remote-cache names it, instead of a folder.",
        envvar="KVSTRATA_REMOTE_CACHE",
        metavar="url",
        show_default="none",
    ),
]
SecretFile = Annotated[
    Path | None,
    typer.Option(
        "--remote-secret-file",
        help="The secret of its servers.",
        envvar="KVSTRATA_REMOTE_SECRET_FILE",
        metavar="file",
        show_default="none",
    ),
]


def ls(url: str, *, as_json: bool) -> None:
    """List blocks by name and size. Names reveal nothing without the tokens."""
    from kvstrata.sizes import format_bytes
    from kvstrata.tiers.remote.block_store import list_sealed_blocks

    with opened(url) as store:
        blocks = list_sealed_blocks(store)
    if as_json:
        typer.echo(json.dumps({"blocks": [{"name": each.name, "bytes": each.nbytes} for each in blocks]}))
        return
    for each in blocks:
        typer.echo(f"{each.name[:16]}  {format_bytes(each.nbytes):>9}")
    typer.echo(f"{len(blocks)} blocks, {format_bytes(sum(each.nbytes for each in blocks))}")


def verify(url: str, secret_file: Path | None, *, as_json: bool) -> None:
    """Verify all blocks. Exits with 1 if any is damaged."""
    from kvstrata.prefix_cache.keys import chain
    from kvstrata.sizes import format_bytes
    from kvstrata.tiers.remote.block_store import verify_store
    from kvstrata.tiers.remote.sealing import keys_for
    from kvstrata.tiers.remote.url import parse_url

    keys = keys_for(parse_url(url), secret_file)
    with opened(url) as store:
        found = verify_store(store, keys, chain)
    if as_json:
        damaged = [{"name": name, "reason": reason} for name, reason in found.damaged]
        typer.echo(json.dumps({"blocks": found.num_blocks, "bytes": found.num_bytes, "damaged": damaged}))
    else:
        for name, reason in found.damaged:
            typer.echo(f"{name[:16]}  {reason}")
        whole = f"{found.num_blocks} blocks are whole, {format_bytes(found.num_bytes)}"
        typer.echo(f"{whole}; {len(found.damaged)} are damaged or sealed with another secret")
    if found.damaged:
        raise typer.Exit(1)


def measured(url: str) -> MeasuredStore:
    from kvstrata.tiers.remote.block_store import measure_store

    with opened(url) as store:
        return measure_store(store)


@contextmanager
def opened(url: str) -> Iterator[KeyValueStore]:
    """Open a store and turn its faults into one-line errors."""
    from kvstrata.tiers.remote.health import StoreFault
    from kvstrata.tiers.remote.open_store import describe_fault, make_store
    from kvstrata.tiers.remote.url import parse_url

    place = parse_url(url)
    store = make_store(place)
    try:
        yield store
    except StoreFault as fault:
        raise KvstrataError(describe_fault(place, fault)) from None
    finally:
        store.close()
