"""Checks whether a grammar accepts a text, token by token as in a reply, each one against the mask."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstrata.grammar.constraint import Constraint
from kvstrata.grammar.matcher import Matcher, TokenMasks
from tests.support.models import byte_grammars, byte_model, ids_of


def allowed_ids(matcher: Matcher) -> set[int]:
    vocab_size = byte_model().vocab_size
    allowed = TokenMasks().fill([matcher], vocab_size)
    assert not allowed.failures
    if allowed.tokens is None:
        return set(range(vocab_size))
    assert allowed.tokens.shape == (1, vocab_size)
    return set(np.flatnonzero(allowed.tokens[0]).tolist())


def takes_ids(constraint: Constraint, ids: Sequence[int]) -> bool:
    """All of them, and then an end."""
    matcher = byte_grammars().compile(constraint).matcher()
    for place, id_ in enumerate(ids):
        if id_ not in allowed_ids(matcher):
            return False
        matcher.consume(place, id_)
        assert not matcher.error
    return byte_model().eos_ids <= allowed_ids(matcher)


def takes(constraint: Constraint, text: str) -> bool:
    return takes_ids(constraint, ids_of(text))
