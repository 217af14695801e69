"""Models for every room's tests: the default one, and tiny random ones wrapped as if they had been loaded."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

# Before mlx.core: it makes MLX use a fast BLAS.
import kvstrata  # noqa: F401
from kvstrata.models.load import load
from kvstrata.models.loaded import LoadedModel
from tests.tiny import tiny_loaded

# Other work on the machine must not fail a property.
settings.register_profile("kvstrata", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("kvstrata")


@pytest.fixture(scope="session")
def default_model() -> LoadedModel:
    return load(None)


@pytest.fixture(scope="session")
def tiny_model() -> Callable[[str], LoadedModel]:
    return tiny_loaded


@pytest.fixture(scope="session")
def shared_folder() -> Path:
    """Texts and traces that are not part of the project: what needs them is skipped without them."""
    folder = Path(__file__).parents[2] / "shared"
    if not folder.is_dir():
        pytest.skip("needs the folder 'shared' beside the project")
    return folder
