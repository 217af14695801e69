"""Servers of the comparison: kvstrata, mlx-lm, vllm-mlx, and llama.cpp as `llama-server` and as `llama_cpp.server`.

vllm-mlx 0.6.0 needs an older mlx-lm than kvstrata. `llama-server` is a binary that the user names, or the prebuilt one
in PyPI's xllamacpp. That build runs on any machine of an architecture and uses no newer instructions: its token counts
are meaningful, its times are not. `llama_cpp.server` is PyPI's llama-cpp-python, built by `make peers`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from kvstrata.bench.peers.base import FOLDER, ROOT, ComparedModel, Peer, ServerStart, asked, package_version
from kvstrata.platform.device import usable_cores

F16_BYTES = 2  # of a number of K or V
NO_GGUF = "llama.cpp needs the model as GGUF. Next: --gguf FILE"
EVALUATED = re.compile(r"prompt eval time =\s*[\d.]+ ms /\s*(\d+) tokens")


class _LlamaCpp(Peer):
    def prefilled_in(self, log: str) -> int | None:
        """llama.cpp logs what it evaluated of each prompt."""
        found = EVALUATED.findall(log)
        return sum(map(int, found)) if found else None


class LlamaServer(_LlamaCpp):
    name = "llama-server"
    known_note = "its log says the same"

    def __init__(self, folder: Path = FOLDER, binary: Path | None = None) -> None:
        super().__init__(folder)
        self._binary = binary

    @property
    def _python(self) -> Path:
        return self._folder / "llama-server" / "bin" / "python"

    def missing(self, model: ComparedModel) -> str:
        if self._binary is not None and shutil.which(str(self._binary)) is None:
            return f"There is no program {self._binary}. Check --llama-server"
        if self._binary is None and not self._python.is_file():
            return "llama-server is not here. Next: make peers, or --llama-server PATH"
        return "" if model.gguf else NO_GGUF

    def version(self) -> str:
        if self._binary is None:
            return f"{package_version(self._python, 'xllamacpp')}, prebuilt: slower than a build for this machine"
        done = subprocess.run([str(self._binary), "--version"], capture_output=True, text=True, timeout=60, check=False)
        return " ".join((done.stdout + done.stderr).split("\n")[:1])

    def command(self, start: ServerStart) -> list[str]:
        """Four slots over one pool of KV, as llama-server comes. A limit is the pool's size, without its RAM cache."""
        pool = start.limit_tokens
        if self._binary is None:
            script = ROOT / "peers" / "llama_server.py"
            return [str(self._python), str(script), str(start.model.gguf), str(start.port), str(pool)]
        limit = ("-c", str(pool), "--cache-ram", "0") if pool else ()
        address = ("--host", "127.0.0.1", "--port", str(start.port))
        return [str(self._binary), "-m", str(start.model.gguf), *address, "-np", "4", "--kv-unified", *limit]


class LlamaCppPython(_LlamaCpp):
    name = "llama_cpp.server"
    known_by = "log"
    known_note = "its usage does not say; llama.cpp's log says what was evaluated of each prompt"
    ready_path = "/v1/models"

    @property
    def _python(self) -> Path:
        return self._folder / "llama-cpp" / "bin" / "python"

    def missing(self, model: ComparedModel) -> str:
        if not next(self._python.parent.parent.glob("lib/python*/site-packages/llama_cpp"), None):
            return "llama-cpp-python is not installed. Next: make peers"
        return "" if model.gguf else NO_GGUF

    def version(self) -> str:
        return package_version(self._python, "llama-cpp-python")

    def command(self, start: ServerStart) -> list[str]:
        """With its RAM cache, which it comes without: it holds one sequence otherwise."""
        size = start.limit_bytes(F16_BYTES) or 2 << 30
        return [
            *(str(self._python), "-m", "llama_cpp.server", "--model", str(start.model.gguf)),
            *("--host", "127.0.0.1", "--port", str(start.port), "--n_ctx", str(start.model.context_tokens)),
            # The default is half of the cores.
            *("--n_threads", str(usable_cores()), "--n_threads_batch", str(usable_cores())),
            *("--cache", "true", "--cache_size", str(size), "--interrupt_requests", "false", "--verbose", "true"),
        ]


class MlxLm(Peer):
    name = "mlx_lm.server"
    known_note = "checked by time"
    on_mlx = True

    @property
    def _python(self) -> Path:
        return self._folder / "mlx-lm" / "bin" / "python"

    def missing(self, model: ComparedModel) -> str:  # noqa: ARG002
        return "" if self._python.is_file() else "mlx-lm is not installed. Next: make peers"

    def version(self) -> str:
        return package_version(self._python, "mlx-lm", "mlx")

    def command(self, start: ServerStart) -> list[str]:
        limit = ["--prompt-cache-bytes", str(start.limit_bytes())] if start.limit_tokens else []
        address = ("--host", "127.0.0.1", "--port", str(start.port))
        return [str(self._python), "-m", "mlx_lm", "server", "--model", str(start.model.dense), *address, *limit]

    def model_name(self, model: ComparedModel) -> str:
        return str(model.dense)

    def held_bytes(self, url: str, log: str) -> int | None:  # noqa: ARG002
        """Logged with each request, in steps of 10 MB."""
        found = re.findall(r"Prompt Cache: \d+ sequences, ([\d.]+) GB", log)
        return round(float(found[-1]) * 1e9) if found else None


class Kvstrata(Peer):
    name = "kvstrata"
    compiles = True

    def missing(self, model: ComparedModel) -> str:  # noqa: ARG002
        return ""

    def version(self) -> str:
        from importlib.metadata import version

        return f"kvstrata {version('kvstrata')}, mlx {version('mlx')}, mlx-lm {version('mlx-lm')}"

    def command(self, start: ServerStart) -> list[str]:
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


class VllmMlx(Peer):
    name = "vllm-mlx"
    known_by = "time"
    known_note = "its usage does not say, and its own counters count hits that it then computes"
    on_mlx = True

    @property
    def _program(self) -> Path:
        return self._folder / "vllm-mlx" / "bin" / "vllm-mlx"

    def missing(self, model: ComparedModel) -> str:  # noqa: ARG002
        return "" if self._program.is_file() else "vllm-mlx is not installed. Next: make peers"

    def version(self) -> str:
        return package_version(self._program.with_name("python"), "vllm-mlx", "mlx-lm", "mlx")

    def command(self, start: ServerStart) -> list[str]:
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

    def environment(self, start: ServerStart) -> Mapping[str, str]:
        """It keeps caches under the user's home, which must not be this user's."""
        return {**super().environment(start), "HOME": str(start.home)}

    def model_name(self, model: ComparedModel) -> str:
        return str(model.dense)

    def held_bytes(self, url: str, log: str) -> int | None:  # noqa: ARG002
        stats = asked(url, "/v1/cache/stats")
        megabytes = ((stats or {}).get("engine_cache") or {}).get("current_memory_mb")
        return None if megabytes is None else round(megabytes * (1 << 20))
