"""Settings that point each coding agent at our server without touching the agent's own settings.

Knows the agents' variables, flags and files. Starts nothing and writes nothing: `cli/launch.py` does. An agent's own
settings stay in force except for the choice of model and server.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_OUTPUT_TOKENS = 8192
# Not KVSTRATA_API_KEY: a server started by the agent would use that as its own key.
KEY_VARIABLE = "KVSTRATA_LAUNCH_KEY"


@dataclass(frozen=True)
class AgentServer:
    """The properties of the server that an agent needs."""

    url: str  # without /v1
    model: str
    context_tokens: int
    thinks: bool = True  # the model may think before it answers

    @property
    def output_tokens(self) -> int:
        """Return the longest reply to request. Agents reserve this part of the context for the reply."""
        return min(MAX_OUTPUT_TOKENS, max(1, self.context_tokens // 4))


@dataclass(frozen=True)
class AgentStart:
    """Command line, variables and files that start an agent. The user's own arguments follow `arguments`."""

    arguments: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    key_variable: str = KEY_VARIABLE  # the only place of the key
    unset: tuple[str, ...] = ()  # variables that would select another server or model
    files: Mapping[str, str] = field(default_factory=dict)  # file name -> text, in the temporary folder


@dataclass(frozen=True)
class Agent:
    title: str
    command: str
    install: str
    start: Callable[[AgentServer, Path], AgentStart]  # the path: a temporary folder that has `files` while it runs


def claude(server: AgentServer, _folder: Path) -> AgentStart:
    # All of its model roles (titles, subagents) get the one served model.
    kinds = ("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL")
    tiers = (f"ANTHROPIC_DEFAULT_{tier}_MODEL" for tier in ("HAIKU", "SONNET", "OPUS"))
    return AgentStart(
        variables={
            "ANTHROPIC_BASE_URL": server.url,
            **dict.fromkeys((*kinds, *tiers), server.model),
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(server.context_tokens),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(server.output_tokens),
            # Some versions begin the system prompt with a block that changes with every turn.
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            # Otherwise variables in the user's settings.json would override these.
            "CLAUDE_CODE_PROVIDER_MANAGED_BY_HOST": "1",
        },
        key_variable="ANTHROPIC_AUTH_TOKEN",
        unset=("ANTHROPIC_API_KEY", *(f"CLAUDE_CODE_USE_{other}" for other in ("BEDROCK", "VERTEX", "FOUNDRY"))),
    )


def codex(server: AgentServer, _folder: Path) -> AgentStart:
    settings = {
        "model": toml_text(server.model),
        "model_provider": '"kvstrata"',
        "model_context_window": str(server.context_tokens),
        "model_providers.kvstrata.name": '"kvstrata"',
        "model_providers.kvstrata.base_url": toml_text(f"{server.url}/v1"),
        "model_providers.kvstrata.env_key": toml_text(KEY_VARIABLE),
        "model_providers.kvstrata.wire_api": '"responses"',
        "analytics.enabled": "false",
    }
    return AgentStart(tuple(word for name, value in settings.items() for word in ("-c", f"{name}={value}")))


def opencode(server: AgentServer, _folder: Path) -> AgentStart:
    model = f"kvstrata/{server.model}"
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "kvstrata",
        "env": [KEY_VARIABLE],
        "options": {"baseURL": f"{server.url}/v1"},
        "models": {server.model: {"limit": {"context": server.context_tokens, "output": server.output_tokens}}},
    }
    config = json.dumps({"model": model, "small_model": model, "provider": {"kvstrata": provider}})
    # OpenCode expands {env:...} and {file:...}; a name must stay as it is.
    config = config.replace("{env:", "\\u007benv:").replace("{file:", "\\u007bfile:")
    return AgentStart(variables={"OPENCODE_CONFIG_CONTENT": config})


def pi(server: AgentServer, folder: Path) -> AgentStart:
    """Configure Pi by an extension, which adds to the user's settings; a settings folder would replace them."""
    model = {
        "id": server.model,
        "name": server.model,
        "reasoning": server.thinks,
        "input": ["text"],
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
        "contextWindow": server.context_tokens,
        "maxTokens": server.output_tokens,
    }
    provider: dict[str, Any] = {
        "name": "kvstrata",
        "baseUrl": f"{server.url}/v1",
        "apiKey": f"${KEY_VARIABLE}",
        "api": "openai-completions",
        "models": [model],
    }
    extension = f'export default (pi) => pi.registerProvider("kvstrata", {json.dumps(provider, indent=2)});\n'
    return AgentStart(
        ("--extension", str(folder / "kvstrata.js"), "--provider", "kvstrata", "--model", server.model),
        files={"kvstrata.js": extension},
    )


def aider(server: AgentServer, folder: Path) -> AgentStart:
    model = f"openai/{server.model}"
    limits = {
        "max_input_tokens": server.context_tokens,
        "max_output_tokens": server.output_tokens,
        "litellm_provider": "openai",
        "mode": "chat",
    }
    # Aider names no longest reply: a model that repeats itself would go on until the context is full. Under this name
    # the rest of what aider knows of such a model stays.
    settings = [{"name": "aider/extra_params", "extra_params": {"max_tokens": server.output_tokens}}]
    return AgentStart(
        (
            *("--model", model, "--openai-api-base", f"{server.url}/v1"),
            *("--model-metadata-file", str(folder / "metadata.json")),
            *("--model-settings-file", str(folder / "settings.yml")),
        ),
        # Otherwise aider downloads a list of models.
        {"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        key_variable="AIDER_OPENAI_API_KEY",
        files={"metadata.json": json.dumps({model: limits}), "settings.yml": json.dumps(settings)},
    )


def toml_text(text: str) -> str:
    """Return a text as a TOML string on one line."""
    return '"' + "".join(map(_toml_character, text)) + '"'


def _toml_character(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    return character if character.isprintable() else f"\\U{ord(character):08x}"


AGENTS: Mapping[str, Agent] = {
    "claude": Agent("Claude Code", "claude", "npm install -g @anthropic-ai/claude-code", claude),
    "codex": Agent("Codex", "codex", "npm install -g @openai/codex", codex),
    "opencode": Agent("opencode", "opencode", "npm install -g opencode-ai", opencode),
    "pi": Agent("pi", "pi", "npm install -g @earendil-works/pi-coding-agent", pi),
    "aider": Agent("aider", "aider", "uv tool install --python 3.12 aider-chat", aider),
}
