"""What the comparison asks of a peer: where it is installed, how it is started, and what it tells of its cache.

A peer says its command and its environment; process.py starts and ends it. None of them is imported here: each lives in
an environment of its own, made by `make peers`.
"""

from __future__ import annotations

import json
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx

ROOT = Path(__file__).parents[4]
FOLDER = ROOT / ".peers"  # where `make peers` puts them

# How the tokens that a server really computed are known.
KnownBy = Literal["reported", "log", "time"]


@dataclass(frozen=True)
class Model:
    """One model, as each peer finds it."""

    name: str
    ours: str | None  # what kvstrata serve takes; None: the default model
    folder: Path  # for mlx-lm, weights as they are served
    dense: Path  # the same in float32 where the CPU multiplies packed weights slowly, else `folder`
    gguf: Path | None
    context_tokens: int
    token_values: int  # K and V of a token, in numbers
    mlx_value_bytes: int  # of such a number on MLX: 4 on a CPU, where models run in float32, else 2


@dataclass(frozen=True)
class Start:
    """How a server is to be started."""

    model: Model
    port: int
    home: Path  # a folder for what it keeps; the same one after a restart
    limit_tokens: int = 0  # stored KV has room for so many; 0: as it comes
    blas: Path | None = None  # for those on MLX

    def limit_bytes(self, value_bytes: int | None = None) -> int:
        """`value_bytes`: of a number of K or V; as on MLX by default."""
        return self.limit_tokens * self.model.token_values * (value_bytes or self.model.mlx_value_bytes)


class Peer(ABC):
    name: str
    known_by: KnownBy = "reported"
    known_note: str = ""  # why, where it is not plain
    on_mlx = False
    compiles = False  # for a long time, when it is first started on a machine
    ready_path = "/health"

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder

    @abstractmethod
    def missing(self, model: Model) -> str:
        """Why it cannot run, and what helps; empty where it can."""

    @abstractmethod
    def command(self, start: Start) -> list[str]: ...

    @abstractmethod
    def version(self) -> str: ...

    def environment(self, start: Start) -> Mapping[str, str]:
        """Added to that of the process."""
        return preloaded(start.blas) if self.on_mlx else {}

    def model_name(self, model: Model) -> str:
        """What requests call it."""
        return model.name

    def held_bytes(self, url: str, log: str) -> int | None:  # noqa: ARG002
        """What its cache holds, where it tells."""
        return None

    def prefilled_in(self, log: str) -> int | None:  # noqa: ARG002
        """Prompt tokens that it computed, by what it has logged meanwhile."""
        return None


def preloaded(library: Path | None) -> dict[str, str]:
    """A library that is loaded first wins over the reference BLAS of MLX's wheel (platform/blas.py)."""
    if library is None:
        return {}
    from kvstrata.platform.device import usable_cores

    threads = str(usable_cores())
    return {"LD_PRELOAD": str(library), "OPENBLAS_NUM_THREADS": threads, "OPENBLAS_THREAD_TIMEOUT": "4"}


def package_version(python: Path, *names: str) -> str:
    """Of what an environment has, such as 'mlx-lm 0.32.2, mlx 0.32.4'."""
    code = "import json, sys, importlib.metadata as m; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
    try:
        done = subprocess.run([str(python), "-c", code, *names], capture_output=True, text=True, timeout=60, check=True)
        found: dict[str, str] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return "version not known"
    return ", ".join(f"{name} {version}" for name, version in found.items())


def asked(url: str, path: str) -> Any:
    """What a server answers to a question about itself; None where it does not."""
    try:
        response = httpx.get(f"{url}{path}", timeout=10, trust_env=False)
        return response.json() if response.status_code == httpx.codes.OK else None
    except (httpx.HTTPError, ValueError):
        return None
