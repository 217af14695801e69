"""Puts the servers that `kvstrata bench compare` runs into a folder: install.py .peers [BACKEND] [NAME ...]

Each gets an environment of its own, because they need other versions of the same packages. One that cannot be installed
is named, with the reason, and left out; one that is there in the wanted version is left alone. BACKEND is MLX's on
Linux: cpu, cuda12 or cuda13. Needs Python's and npm's package registries, and nothing but the standard library.

mlx-lm          mlx_lm.server as it comes
vllm-mlx        6.5 GB, because it brings torch
llama-server    llama.cpp's own server, prebuilt (xllamacpp)
llama-cpp       llama_cpp.server, built from its source here: about 20 minutes on two cores, needs cmake and a compiler
node-llama-cpp  llama.cpp's engine without a server, prebuilt for Node 20 or newer: for `python -m benchmarks.cpu`
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
MIN_NODE = 20
LAST_LINES = 3


class CannotInstall(Exception):
    """Why, for the user."""


@dataclass(frozen=True)
class Environment:
    """Packages of a virtual environment; `check` is imported to see that they work."""

    packages: tuple[str, ...]
    check: str
    settings: dict[str, str] = field(default_factory=dict)
    programs: tuple[tuple[str, ...], ...] = ()  # one of each must be there


def environments(backend: str) -> dict[str, Environment]:
    mlx = ("mlx",) if sys.platform == "darwin" else (f"mlx[{backend}]",)
    # One process for each core would take more memory than a small machine has.
    build = {"CMAKE_BUILD_PARALLEL_LEVEL": os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", "2")}
    return {
        "mlx-lm": Environment((*mlx, "mlx-lm==0.32.2"), "mlx_lm.server"),
        "llama-server": Environment(("xllamacpp==2026.10.11549",), "xllamacpp"),
        "vllm-mlx": Environment((*mlx, "vllm-mlx==0.6.0"), "vllm_mlx"),
        "llama-cpp": Environment(
            ("llama-cpp-python[server]==0.3.36",), "llama_cpp.server", build, (("cmake",), ("c++", "g++", "clang++"))
        ),
    }


def main(folder: Path, backend: str, names: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    known = environments(backend)
    for name in names or [*known, "node-llama-cpp"]:
        try:
            if name == "node-llama-cpp":
                said = install_node(folder)
            elif name in known:
                said = install(folder / name, known[name])
            else:
                raise CannotInstall(f"there is no such peer; known are {', '.join([*known, 'node-llama-cpp'])}")
        except CannotInstall as error:
            said = f"skipped: {error}"
        print(f"{name}: {said}", flush=True)


def install(folder: Path, wanted: Environment) -> str:
    stamp = folder / "installed.txt"
    listed = "\n".join(wanted.packages) + "\n"
    if stamp.is_file() and stamp.read_text() == listed:
        return "is there"
    for either in wanted.programs:
        if not any(map(shutil.which, either)):
            raise CannotInstall(f"it is built here, and there is no {' or '.join(either)}")
    python = folder / "bin" / "python"
    if not python.is_file():
        run([sys.executable, "-m", "venv", str(folder)])
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", *wanted.packages]
    run(pip, {**os.environ, **wanted.settings})
    run([str(python), "-c", f"import {wanted.check}"])
    stamp.write_text(listed)
    return "installed"


def install_node(folder: Path) -> str:
    """No scripts of packages: one of them would fetch or build what npm does not have."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        raise CannotInstall(f"it needs Node {MIN_NODE} or newer with npm, and there is none here")
    version = run([node, "--version"]).strip()
    if int(version.lstrip("v").partition(".")[0]) < MIN_NODE:
        raise CannotInstall(f"it needs Node {MIN_NODE} or newer; this is {version}")
    package, listed = folder / "package.json", (HERE / "package.json").read_text()
    if (folder / "node_modules").is_dir() and package.is_file() and package.read_text() == listed:
        return "is there"
    package.write_text(listed)
    quiet = ["--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
    run([npm, "--prefix", str(folder), "install", *quiet])
    script = (HERE / "llama.mjs").absolute()
    return "installed, " + run([node, str(script)], cwd=folder, words='{"do": "about"}').strip()


def run(command: list[str], environment: dict[str, str] | None = None, cwd: Path | None = None, words: str = "") -> str:
    try:
        done = subprocess.run(
            command, env=environment, cwd=cwd, input=words, capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise CannotInstall(str(error)) from error
    if done.returncode != 0:
        last = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()][-LAST_LINES:]
        raise CannotInstall(f"{' '.join(command[:4])} ... failed: {' / '.join(last)}")
    return done.stdout


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "cpu", sys.argv[3:])
