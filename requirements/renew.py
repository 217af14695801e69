"""Renew the files beside this one: the version and the hashes of every package that make installs.

    make lock                       after a change of pyproject.toml: what still fits stays as it is
    make lock ARGS=--upgrade        the newest releases that pyproject.toml allows

serve.txt has what every server needs, and the build backend. Each other file has what its extra of pyproject.toml needs
beside that. All are of one resolution, for Linux and macOS and every Python that kvstrata runs on: hashes are of all
files of a release. Needs uv, whose options are taken; pip or uv installs from the files.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parent
PROJECT = FOLDER.parent / "pyproject.toml"
SERVE = "serve"
EXTRAS = ("cpu", "cuda12", "cuda13", "dev", "docs")
HEADER = """\
# Made by requirements/renew.py: do not edit. Renew it with: make lock
# {what}
"""


def main(options: list[str]) -> None:
    if shutil.which("uv") is None:
        sys.exit("requirements/renew.py needs uv, and finds none. Next: pip install uv")
    project = tomllib.loads(PROJECT.read_text())
    with tempfile.TemporaryDirectory() as name:
        build, every = Path(name) / "build.in", Path(name) / "every.txt"
        build.write_text("\n".join(project["build-system"]["requires"]))
        # uv stays with the versions that the file has already.
        every.write_text("".join(path.read_text() for path in sorted(FOLDER.glob("*.txt"))))
        _compile(project, build, every, *(f"--extra={extra}" for extra in EXTRAS), *options)
        serve = _compile(project, build, Path(name) / "serve.txt", f"--constraint={every}")
        _write(SERVE, "What every server needs, and the build backend.", serve)
        for extra in EXTRAS:
            both = _compile(project, build, Path(name) / f"{extra}.txt", f"--constraint={every}", f"--extra={extra}")
            _write(
                extra, f"What the extra {extra} needs beside {SERVE}.txt.", [each for each in both if each not in serve]
            )


def _compile(project: dict[str, dict[str, str]], build: Path, target: Path, *options: str) -> list[str]:
    """Resolve into `target`; return its requirements, each with its marker and hashes."""
    oldest = project["project"]["requires-python"].removeprefix(">=")
    command = ["uv", "pip", "compile", str(PROJECT), str(build), "--universal", f"--python-version={oldest}"]
    command += ["--generate-hashes", "--no-annotate", "--no-header", "--no-emit-index-url", "--quiet", *options]
    subprocess.run([*command, f"--output-file={target}"], check=True, stdout=subprocess.DEVNULL)
    return list(_requirements(target.read_text()))


def _requirements(text: str) -> Iterator[str]:
    lines: list[str] = []
    for line in text.splitlines(keepends=True):
        lines.append(line)
        if not line.endswith("\\\n"):
            yield "".join(lines)
            lines = []


def _write(name: str, what: str, requirements: list[str]) -> None:
    (FOLDER / f"{name}.txt").write_text(HEADER.format(what=what) + "".join(requirements))


if __name__ == "__main__":
    main(sys.argv[1:])
