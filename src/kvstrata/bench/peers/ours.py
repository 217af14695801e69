"""kvstrata itself, as its users start it."""

from __future__ import annotations

import sys

from kvstrata.bench.peers.base import Model, Peer, Start, asked


class Kvstrata(Peer):
    name = "kvstrata"
    compiles = True

    def missing(self, model: Model) -> str:  # noqa: ARG002
        return ""

    def version(self) -> str:
        from importlib.metadata import version

        return f"kvstrata {version('kvstrata')}, mlx {version('mlx')}, mlx-lm {version('mlx-lm')}"

    def command(self, start: Start) -> list[str]:
        served = [] if start.model.ours is None else [start.model.ours]
        limit = ["--dynamic-cache", "--hot-cache-size", str(start.limit_bytes())]
        return [
            sys.executable,
            "-c",
            "from kvstrata.cli import main; main()",
            "serve",
            *served,
            *("--host", "127.0.0.1", "--port", str(start.port)),
            *("--disk-cache-dir", str(start.home / "disk")),
            *(limit if start.limit_tokens else []),
        ]

    def held_bytes(self, url: str, log: str) -> int | None:  # noqa: ARG002
        usage = asked(url, "/cache/usage")
        return None if usage is None else int(usage["tiers"]["hot"]["bytes"])
