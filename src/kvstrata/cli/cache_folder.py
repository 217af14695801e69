"""`kvstrata cache ls|verify|gc`: inspection of a disk cache folder or of a shared store (--remote), without a server.

`doctor` measures a store through `measure_remote`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstrata.cli.http_client import AsJson
from kvstrata.errors import KvstrataError

if TYPE_CHECKING:
    from kvstrata.tiers.disk.index import BlockRecord
    from kvstrata.tiers.disk.scan import DamagedFile, UnreadFile
    from kvstrata.tiers.remote.block_store import MeasuredStore
    from kvstrata.tiers.remote.store import KeyValueStore

_FOLDER = typer.Argument(
    help="The folder that --disk-cache-dir names.", envvar="KVSTRATA_DISK_CACHE_DIR", exists=True, file_okay=False
)
Folder = Annotated[Path, _FOLDER]
FolderOrNone = Annotated[Path | None, _FOLDER]
RemoteUrl = Annotated[
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
        help="File with the secret that its servers share.",
        envvar="KVSTRATA_REMOTE_SECRET_FILE",
        metavar="file",
        show_default="none",
    ),
]


def ls(folder: FolderOrNone = None, remote: RemoteUrl = None, as_json: AsJson = False) -> None:
    """List the blocks of a folder, from their headers, or of a store (--remote). Ends with 1 if some could not be
    read."""
    if folder is None:
        _list_store(_require(remote), as_json=as_json)
        return
    from kvstrata.sizes import format_bytes
    from kvstrata.tiers.disk.inspect import list_blocks

    listing = list_blocks(folder)
    rows = [_row(row) for row in listing.rows]
    if as_json:
        damaged = [str(file.path) for file in listing.damaged]
        typer.echo(json.dumps({"blocks": rows, "damaged": damaged, "unread": _reasons(listing.unread)}))
    else:
        for row in rows:
            tokens = f"{row['start']} to {row['start'] + row['tokens']}"
            typer.echo(
                f"{row['key'][:16]}  {row['part']:<5} {tokens:>17}  {format_bytes(row['bytes']):>9}  {row['uses']} uses"
            )
        total = format_bytes(sum(row["bytes"] for row in rows))
        damaged = f"{len(listing.damaged)} with a damaged header"
        typer.echo(f"{len(rows)} files, {total}; {damaged}, {len(listing.unread)} that could not be read")
        _echo_files(listing.unread)
    if listing.unread:
        raise typer.Exit(1)


def verify(
    folder: FolderOrNone = None,
    remote: RemoteUrl = None,
    secret_file: SecretFile = None,
    as_json: AsJson = False,
) -> None:
    """Read every block of a folder or a store (--remote) and check it. Changes nothing; ends with 1 if something is
    damaged or could not be read."""
    if folder is None:
        _verify_store(_require(remote), secret_file, as_json=as_json)
        return
    from kvstrata.prefix_cache.keys import chain
    from kvstrata.sizes import format_bytes
    from kvstrata.tiers.disk.inspect import verify as verify_blocks

    found = verify_blocks(folder, chain=chain)
    if as_json:
        files = {"damaged": _reasons(found.damaged), "unread": _reasons(found.unread)}
        typer.echo(json.dumps({"blocks": found.num_blocks, "bytes": found.num_bytes, **files}))
    else:
        whole = f"{found.num_blocks} blocks are whole, {format_bytes(found.num_bytes)}"
        typer.echo(f"{whole}; {len(found.damaged)} are damaged, {len(found.unread)} could not be read")
        _echo_files((*found.damaged, *found.unread))
    if found.damaged or found.unread:
        raise typer.Exit(1)


def _require(remote: str | None) -> str:
    if remote is None:
        raise KvstrataError("Name the folder of a disk cache, or a store that servers share with --remote URL.")
    return remote


def gc(
    folder: Folder,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the files, and remove none.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove files that no server can use: left-over temporaries, damaged and orphaned blocks, quarantined files."""
    from kvstrata.tiers.disk.inspect import collect_garbage, find_garbage

    garbage = find_garbage(folder) if dry_run else collect_garbage(folder)
    paths = [str(path) for path in garbage.paths()]
    if as_json:
        typer.echo(json.dumps({"dry_run": dry_run, "files": paths}))
        return
    typer.echo(f"{len(paths)} files {'would be' if dry_run else 'were'} removed")
    for path in paths:
        typer.echo(f"  {path}")


def _reasons(files: Sequence[DamagedFile | UnreadFile]) -> list[dict[str, str]]:
    return [{"file": str(file.path), "reason": str(file.reason)} for file in files]


def _echo_files(files: Sequence[DamagedFile | UnreadFile]) -> None:
    for file in files:
        typer.echo(f"  {file.path}: {file.reason}")


def _row(row: BlockRecord) -> dict[str, Any]:
    return {
        "key": row.id.key.hex(),
        "part": row.id.part,
        "parent": row.parent.hex(),
        "root": row.root.hex(),
        "start": row.start,
        "tokens": row.num_tokens,
        "bytes": row.disk_bytes,
        "uses": row.uses,
    }


def _list_store(url: str, *, as_json: bool) -> None:
    """List blocks by name and size. Names reveal nothing without the tokens."""
    from kvstrata.sizes import format_bytes
    from kvstrata.tiers.remote.block_store import list_sealed_blocks

    with _opened(url) as store:
        blocks = list_sealed_blocks(store)
    if as_json:
        typer.echo(json.dumps({"blocks": [{"name": each.name, "bytes": each.nbytes} for each in blocks]}))
        return
    for each in blocks:
        typer.echo(f"{each.name[:16]}  {format_bytes(each.nbytes):>9}")
    typer.echo(f"{len(blocks)} blocks, {format_bytes(sum(each.nbytes for each in blocks))}")


def _verify_store(url: str, secret_file: Path | None, *, as_json: bool) -> None:
    """Verify all blocks. Exits with 1 if any is damaged."""
    from kvstrata.prefix_cache.keys import chain
    from kvstrata.sizes import format_bytes
    from kvstrata.tiers.remote.block_store import verify_store
    from kvstrata.tiers.remote.sealing import keys_for
    from kvstrata.tiers.remote.url import parse_url

    keys = keys_for(parse_url(url), secret_file)
    with _opened(url) as store:
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


def measure_remote(url: str) -> MeasuredStore:
    """Return the latency and rates of a store, measured with a value of its own."""
    from kvstrata.tiers.remote.block_store import measure_store

    with _opened(url) as store:
        return measure_store(store)


@contextmanager
def _opened(url: str) -> Iterator[KeyValueStore]:
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
