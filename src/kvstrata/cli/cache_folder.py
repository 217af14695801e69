"""`kvstrata cache ls|verify|gc`: look at a folder of the disk cache, without a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstrata.cli.remote import AsJson

if TYPE_CHECKING:
    from kvstrata.tiers.catalogue import Row

Folder = Annotated[
    Path,
    typer.Argument(
        help="The folder that --disk-cache-dir names.", envvar="KVSTRATA_DISK_CACHE_DIR", exists=True, file_okay=False
    ),
]


def ls(folder: Folder, as_json: AsJson = False) -> None:
    """What is in a folder, from the headers of its blocks."""
    from kvstrata.config import human_bytes
    from kvstrata.tiers.inspect import list_blocks

    listing = list_blocks(folder)
    rows = [_row(row) for row in listing.rows]
    if as_json:
        typer.echo(json.dumps({"blocks": rows, "damaged": [str(file.path) for file in listing.damaged]}))
        return
    for row in rows:
        tokens = f"{row['start']} to {row['start'] + row['tokens']}"
        typer.echo(
            f"{row['key'][:16]}  {row['part']:<5} {tokens:>17}  {human_bytes(row['bytes']):>9}  {row['uses']} uses"
        )
    total = sum(row["bytes"] for row in rows)
    typer.echo(f"{len(rows)} files, {human_bytes(total)}; {len(listing.damaged)} with a damaged header")


def verify(folder: Folder, as_json: AsJson = False) -> None:
    """Read every block and check it. Changes nothing; ends with 1 if something is damaged."""
    from kvstrata.config import human_bytes
    from kvstrata.index.keys import chain
    from kvstrata.tiers.inspect import verify as verify_blocks

    found = verify_blocks(folder, chain=chain)
    damaged = [{"file": str(file.path), "reason": str(file.reason)} for file in found.damaged]
    if as_json:
        typer.echo(json.dumps({"blocks": found.num_blocks, "bytes": found.num_bytes, "damaged": damaged}))
    else:
        typer.echo(f"{found.num_blocks} blocks are whole, {human_bytes(found.num_bytes)}; {len(damaged)} are damaged")
        for file in damaged:
            typer.echo(f"  {file['file']}: {file['reason']}")
    if damaged:
        raise typer.Exit(1)


def gc(
    folder: Folder,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and leave it.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove what no server can use: left-over temporaries, damaged and orphaned blocks, quarantined files."""
    from kvstrata.tiers.inspect import collect_garbage, find_garbage

    garbage = find_garbage(folder) if dry_run else collect_garbage(folder)
    paths = [str(path) for path in garbage.paths()]
    if as_json:
        typer.echo(json.dumps({"dry_run": dry_run, "files": paths}))
        return
    typer.echo(f"{len(paths)} files {'would be' if dry_run else 'were'} removed")
    for path in paths:
        typer.echo(f"  {path}")


def _row(row: Row) -> dict[str, Any]:
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
