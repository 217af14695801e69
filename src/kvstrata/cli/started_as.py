"""The command that started this process, for messages that users copy into a shell."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path


def started_as() -> str:
    """Return `kvstrata` where the shell finds this installation under that name, else the path to its script."""
    script = Path(sys.argv[0])
    if script.name == "__main__.py":
        return f"{_shown(Path(sys.executable))} -m kvstrata"
    if script.name != "kvstrata" or not script.is_file():
        return "kvstrata"
    on_path = shutil.which("kvstrata")
    if on_path is not None and Path(on_path).samefile(script):
        return "kvstrata"
    return _shown(script)


def _shown(path: Path) -> str:
    """Return a path for a shell, relative where it is below the working folder."""
    path = path.absolute()
    below = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return shlex.quote(str(below))
