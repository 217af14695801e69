"""What agents are sent to do, and what the forced model says on the way: one call, its result, a last word.

The result holds a word that stands nowhere before: a last word that has it proves that the tool ran and that its result
reached the model.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tests.agents.forced import Prompt, Script, call_text

Think = Callable[[str], str]  # from what a reply is about to what the model thinks before it

TASK = "Run the errand: make made.txt, and tell me the word that the command says."
FILE, CONTENT = "made.txt", "made by an agent\n"
# The shell puts the word together.
COMMAND = f"printf 'made by an agent\\n' > {FILE} && echo word-$((6 * 7000))"
WORD = "word-42000"
LAST = f"The errand is done, and the command said {WORD}."
SECRET = "a walrus in the pantry"  # what only thinking says


def thinks(about: str) -> str:
    return f"<think>\nFirst {about}: {SECRET}.\n</think>\n\n"


def thinks_not(_about: str) -> str:
    return ""


def errand(tool: str, arguments: dict[str, Any], think: Think) -> Script:
    """`tool` is the agent's own, called with `arguments`. Requests that do not offer it get a title."""

    def say(prompt: Prompt) -> str:
        if tool not in prompt.tool_names:
            return think("a title") + "An errand"
        asked = max(place for place, turn in enumerate(prompt.turns) if TASK in turn.text)
        results = [turn.text for turn in prompt.turns[asked:] if turn.role == "tool"]
        if not results:
            return think("the call") + "I run the command.\n" + call_text(tool, arguments)
        word = re.search(r"word-\d+", results[-1])
        return think("the word") + LAST.replace(WORD, word[0] if word else f"no word but {results[-1]!r}")

    return say


# For agents that have no tools: they write files from what is said, run a command of the user's, and tell what it said.
CHECK = f"grep -q agent {FILE} || {{ echo word-$((6 * 7000)); exit 1; }}"


def edits(think: Think) -> Script:
    """First a file that the check refuses; then, with the word that the check says, the right one."""

    def say(prompt: Prompt) -> str:
        word = re.search(r"word-\d+", prompt.turns[-1].text)
        if word is None:
            return think("the file") + whole_file("made by nobody\n") + "I made it."
        return think("the word") + whole_file(CONTENT) + LAST.replace(WORD, word[0])

    return say


def whole_file(content: str) -> str:
    return f"{FILE}\n```\n{content}```\n\n"
