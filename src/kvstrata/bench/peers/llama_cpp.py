"""llama.cpp's servers: `llama_cpp.server` (PyPI's llama-cpp-python, built here), and `llama-server`.

The latter is a binary that the user names, or the same server prebuilt in PyPI's xllamacpp. That build is for any
machine of an architecture, without the instructions that newer ones have: its tokens count, its times say little.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from kvstrata.bench.peers.base import FOLDER, ROOT, Model, Peer, Start, package_version
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

    def missing(self, model: Model) -> str:
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

    def command(self, start: Start) -> list[str]:
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

    def missing(self, model: Model) -> str:
        if not next(self._python.parent.parent.glob("lib/python*/site-packages/llama_cpp"), None):
            return "llama-cpp-python is not installed. Next: make peers"
        return "" if model.gguf else NO_GGUF

    def version(self) -> str:
        return package_version(self._python, "llama-cpp-python")

    def command(self, start: Start) -> list[str]:
        """With its RAM cache, which it comes without: it holds one sequence otherwise."""
        size = start.limit_bytes(F16_BYTES) or 2 << 30
        return [
            *(str(self._python), "-m", "llama_cpp.server", "--model", str(start.model.gguf)),
            *("--host", "127.0.0.1", "--port", str(start.port), "--n_ctx", str(start.model.context_tokens)),
            # Half of the cores by default.
            *("--n_threads", str(usable_cores()), "--n_threads_batch", str(usable_cores())),
            *("--cache", "true", "--cache_size", str(size), "--interrupt_requests", "false", "--verbose", "true"),
        ]
