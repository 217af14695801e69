"""The wheel, installed into an environment of its own, serves: nothing that it needs stays behind in the repository."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

import kvstrata
from tests.models.conftest import write_model
from tests.support.models import tiny_config, tiny_module

ROOT = Path(__file__).parents[1]
START_S = 120
BACKEND = "" if sys.platform == "darwin" else "[cpu]"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    dist = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(dist)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (built,) = dist.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny", tiny_module("llama"), tiny_config("llama"))


@pytest.fixture
def environment(wheel: Path, tmp_path: Path) -> Path:
    """kvstrata from the wheel; what it depends on are links to this environment's packages. Without numba: kernels are
    compiled anew wherever they are installed, which takes a minute."""
    made = tmp_path / "env"
    venv.create(made, with_pip=False)
    (site,) = made.glob("lib/python*/site-packages")
    for folder in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for path in Path(folder).iterdir():
            if not re.match(r"(_*editable|kvstrata|numba|llvmlite)", path.name.lstrip("_")) and path.suffix != ".pth":
                (site / path.name).symlink_to(path)
    pip = [sys.executable, "-m", "pip", "--python", str(made / "bin" / "python"), "--disable-pip-version-check"]
    command = [*pip, "install", "--quiet", "--no-deps", "--no-index", "--no-compile", str(wheel)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return made


def outside(**more: str) -> dict[str, str]:
    """This process's variables without those that lead to the repository."""
    left_out = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    return {**{name: value for name, value in os.environ.items() if name not in left_out}, **more}


def said(environment: Path, *arguments: str) -> str:
    command = [str(environment / "bin" / "kvstrata"), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, cwd=environment, env=outside()
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def serving(environment: Path, model: Path) -> Iterator[str]:
    command = [str(environment / "bin" / "kvstrata"), "serve", str(model), "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=environment, env=outside()
    ) as process:
        assert process.stdout is not None
        try:
            lines: list[str] = []
            for line in process.stdout:
                lines.append(line)
                if address := re.match(r"serving +(http://[\d.:]+)", line):
                    yield address[1]
                    return
            pytest.fail("".join(lines))
        finally:
            process.terminate()
            process.stdout.close()
            assert process.wait(60) == 0


def ask(environment: Path, model: Path) -> None:
    with serving(environment, model) as url, httpx.Client(base_url=url, timeout=START_S) as client:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] >= 1
        page = client.get("/")
        assert page.status_code == 200
        for name in re.findall(r'(?:src|href)="(?!data:|https?:)([^"#]+)"', page.text):
            assert client.get(f"/{name.lstrip('/')}").status_code == 200, name


def test_the_wheel_has_what_is_read_at_run_time_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (facts,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(facts).decode()
    package = Path(kvstrata.__file__).parent
    files = {
        path.relative_to(package.parent).as_posix()
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert files <= names
    assert "kvstrata/py.typed" in names
    assert all(name.startswith(("kvstrata/", "kvstrata-")) for name in names)
    assert f"Version: {kvstrata.__version__}" in metadata
    assert "Provides-Extra: cpu" in metadata


def test_the_wheel_serves_in_an_environment_of_its_own(environment: Path, model: Path) -> None:
    python = [str(environment / "bin" / "python"), "-c", "import kvstrata; print(kvstrata.__file__)"]
    where = subprocess.run(
        python, capture_output=True, text=True, check=True, cwd=environment, env=outside(), timeout=60
    )
    assert Path(where.stdout.strip()).is_relative_to(environment)
    assert kvstrata.__version__ in said(environment, "version")
    ask(environment, model)


@pytest.mark.slow
def test_the_wheel_and_all_that_it_depends_on_serve_in_an_empty_environment(
    wheel: Path, model: Path, tmp_path: Path
) -> None:
    made = tmp_path / "env"
    venv.create(made, with_pip=True)
    pip = [str(made / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", f"{wheel}{BACKEND}"], check=True, env=outside(), timeout=900)
    ask(made, model)
