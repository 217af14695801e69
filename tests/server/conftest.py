"""Servers for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import openai
import pytest

from kvstrata.models.load import LoadedModel
from tests.support.models import tiny_loaded
from tests.support.servers import Served, emptied, running


@pytest.fixture(scope="session")
def served(default_model: LoadedModel) -> Iterator[Served]:
    with running(default_model) as one:
        yield one


@pytest.fixture(scope="session")
def endless(default_model: LoadedModel) -> Iterator[Served]:
    """The default model, which never ends a reply by itself: who leaves in the middle must find one."""
    with running(replace(default_model, eos_ids=frozenset())) as one:
        yield one


@pytest.fixture
def serve(default_model: LoadedModel) -> Iterator[Callable[..., Served]]:
    """Servers with settings of their own."""
    with ExitStack() as stack:
        yield lambda **flags: stack.enter_context(running(default_model, **flags))


@pytest.fixture(scope="session")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with served.openai() as one:
        yield one


@pytest.fixture(scope="module")
def tiny() -> Iterator[Served]:
    with running(tiny_loaded("llama")) as one:
        yield one


@pytest.fixture
def fresh(tiny: Served) -> Served:
    return emptied(tiny)
