"""mlx-lm's own server, in an environment of its own."""

from __future__ import annotations

import re
from pathlib import Path

from kvstrata.bench.peers.base import Model, Peer, Start, package_version


class MlxLm(Peer):
    name = "mlx_lm.server"
    known_note = "checked by time"
    on_mlx = True

    @property
    def _python(self) -> Path:
        return self._folder / "mlx-lm" / "bin" / "python"

    def missing(self, model: Model) -> str:  # noqa: ARG002
        return "" if self._python.is_file() else "mlx-lm is not installed. Next: make peers"

    def version(self) -> str:
        return package_version(self._python, "mlx-lm", "mlx")

    def command(self, start: Start) -> list[str]:
        limit = ["--prompt-cache-bytes", str(start.limit_bytes())] if start.limit_tokens else []
        address = ("--host", "127.0.0.1", "--port", str(start.port))
        return [str(self._python), "-m", "mlx_lm", "server", "--model", str(start.model.dense), *address, *limit]

    def model_name(self, model: Model) -> str:
        return str(model.dense)

    def held_bytes(self, url: str, log: str) -> int | None:  # noqa: ARG002
        """Logged with each request, in steps of 10 MB."""
        found = re.findall(r"Prompt Cache: \d+ sequences, ([\d.]+) GB", log)
        return round(float(found[-1]) * 1e9) if found else None
