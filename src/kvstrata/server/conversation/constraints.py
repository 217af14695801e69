"""What a reply must look like: the client's constraint, a call that it must make, or both.

Composes constraints; kvstrata.grammar compiles them.
"""

from __future__ import annotations

from kvstrata.grammar import Constraint
from kvstrata.server.conversation.chat import Chat
from kvstrata.server.service import Service


def constraint_of(service: Service, chat: Chat) -> Constraint | None:
    raise NotImplementedError
