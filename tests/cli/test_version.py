"""`kvstrata version`, `python -m kvstrata`, completion, and what is said where MLX has no back-end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import kvstrata
from kvstrata.platform.device import mlx_backend

KVSTRATA = (sys.executable, "-m", "kvstrata")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", **environment}
    return subprocess.run([*KVSTRATA, *arguments], capture_output=True, text=True, timeout=60, check=False, env=env)


def test_versions_are_those_that_are_installed() -> None:
    told = json.loads(run("version", "--json").stdout)
    assert (told["kvstrata"], told["mlx"], told["mlx-lm"]) == (kvstrata.__version__, version("mlx"), version("mlx-lm"))
    assert told["back-end"] == mlx_backend()
    assert told["python"] == ".".join(map(str, sys.version_info[:3]))
    text = run("version").stdout
    assert all(value in text for value in told.values())


def test_main_runs_as_a_file() -> None:
    file = Path(kvstrata.__file__).parent / "__main__.py"
    done = subprocess.run(
        [sys.executable, str(file), "--version"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == f"kvstrata {kvstrata.__version__}\n"


def test_the_package_is_typed_and_its_version_is_that_of_the_project() -> None:
    import tomllib

    root = Path(kvstrata.__file__).parent
    assert (root / "py.typed").is_file()
    project = root.parents[1] / "pyproject.toml"
    assert tomllib.loads(project.read_text())["project"]["version"] == kvstrata.__version__


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_shown_for_every_shell(shell: str) -> None:
    script = run(_KVSTRATA_COMPLETE=f"source_{shell}").stdout
    assert "_KVSTRATA_COMPLETE" in script
    assert "kvstrata" in script


def completed(line: str) -> set[str]:
    """What bash is offered for the last word."""
    words = line.split(" ")
    done = run(_KVSTRATA_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=str(len(words) - 1))
    return set(done.stdout.split())


def test_commands_and_their_flags_are_completed() -> None:
    assert {"serve", "service"} <= completed("kvstrata se")
    assert "--memory-limit" in completed("kvstrata serve --mem")
    assert "--backend" in completed("kvstrata plan --b")


def test_no_back_end_is_one_sentence_with_the_command(tmp_path: Path) -> None:
    """A Linux user who left the extra out: mlx is there, and its library is not."""
    package = tmp_path / "mlx"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "core.py").write_text("raise ImportError('libmlx.so: cannot open shared object file')")
    code = (
        "import sys; sys.platform = 'linux'; sys.path.insert(0, sys.argv[1]); sys.argv[1:] = ['plan']; "
        "from kvstrata.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("kvstrata: MLX has no back-end on this machine yet. Install one: ")
    assert "install 'kvstrata[" in line


def test_other_import_errors_are_not_hidden() -> None:
    code = (
        "import sys; sys.modules['kvstrata.models.outline'] = None; sys.argv[1:] = ['plan']; "
        "from kvstrata.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" in done.stderr
    assert "back-end" not in done.stderr
