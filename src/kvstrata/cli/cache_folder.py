"""`kvstrata cache ls|verify|gc`: inspection of a disk cache folder, without a server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstrata.cli import cache_store
from kvstrata.cli.remote import AsJson
from kvstrata.errors import KvstrataError

if TYPE_CHECKING:
    from kvstrata.tiers.disk.index import BlockRecord
    from kvstrata.tiers.disk.scan import DamagedFile, UnreadFile

_FOLDER = typer.Argument(
    help="The folder that --disk-cache-dir names.", envvar="KVSTRATA_DISK_CACHE_DIR", exists=True, file_okay=False
)
Folder = Annotated[Path, _FOLDER]
FolderOrNone = Annotated[Path | None, _FOLDER]


def ls(folder: FolderOrNone = None, remote: cache_store.Remote = None, as_json: AsJson = False) -> None:
    """What is in a folder, from the headers of its blocks, or in a store (--remote). Ends with 1 if some could not be
    read."""
    if folder is None:
        cache_store.ls(_require(remote), as_json=as_json)
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
    remote: cache_store.Remote = None,
    secret_file: cache_store.SecretFile = None,
    as_json: AsJson = False,
) -> None:
    """Read every block of a folder or a store (--remote) and check it. Changes nothing; ends with 1 if something is
    damaged or could not be read."""
    if folder is None:
        cache_store.verify(_require(remote), secret_file, as_json=as_json)
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
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and leave it.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove what no server can use: left-over temporaries, damaged and orphaned blocks, quarantined files."""
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
