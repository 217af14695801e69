"""vllm-mlx 0.6.0, which needs an older mlx-lm than ours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kvstrata.bench.peers.base import Model, Peer, Start, asked, package_version


class VllmMlx(Peer):
    name = "vllm-mlx"
    known_by = "time"
    known_note = "its usage does not say, and its own counters count hits that it then computes"
    on_mlx = True

    @property
    def _program(self) -> Path:
        return self._folder / "vllm-mlx" / "bin" / "vllm-mlx"

    def missing(self, model: Model) -> str:  # noqa: ARG002
        return "" if self._program.is_file() else "vllm-mlx is not installed. Next: make peers"

    def version(self) -> str:
        return package_version(self._program.with_name("python"), "vllm-mlx", "mlx-lm", "mlx")

    def command(self, start: Start) -> list[str]:
        """With batching and its disk tier, as one would run it for agents."""
        megabytes = max(1, start.limit_bytes() >> 20)
        return [
            str(self._program),
            "serve",
            str(start.model.dense),
            *("--host", "127.0.0.1", "--port", str(start.port), "--offline", "--continuous-batching"),
            *("--ssd-cache-dir", str(start.home / "ssd")),
            *(("--cache-memory-mb", str(megabytes)) if start.limit_tokens else ()),
        ]

    def environment(self, start: Start) -> Mapping[str, str]:
        """It keeps caches under the user's home, which must not be this user's."""
        return {**super().environment(start), "HOME": str(start.home)}

    def model_name(self, model: Model) -> str:
        return str(model.dense)

    def held_bytes(self, url: str, log: str) -> int | None:  # noqa: ARG002
        stats = asked(url, "/v1/cache/stats")
        megabytes = ((stats or {}).get("engine_cache") or {}).get("current_memory_mb")
        return None if megabytes is None else round(megabytes * (1 << 20))
