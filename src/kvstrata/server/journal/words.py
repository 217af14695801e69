"""A finished request as a log line and as fields of a structured log. Neither contains text of a prompt."""

from __future__ import annotations

from typing import Any

from kvstrata.server.journal.trace import Trace


def line(trace: Trace) -> str:
    said = [f"{trace.method} {trace.path} {trace.status} in {trace.seconds:.2f} s"]
    if trace.asked is not None:
        said.append(_prompt(trace))
    if trace.first_token_s is not None:
        said.append(f"first token {trace.first_token_s:.2f} s")
    if trace.completion_tokens:
        speed = trace.tokens_per_s
        said.append(f"{trace.completion_tokens:,} tokens" + (f" at {speed:.1f}/s" if speed else ""))
    if trace.error:
        said.append(trace.error)
    return ", ".join(said) + f" [{trace.id}]"


def fields(trace: Trace) -> dict[str, Any]:
    """Return the fields of a finished request, without unknown ones."""
    told: dict[str, Any] = {
        "request_id": trace.id,
        "method": trace.method,
        "path": trace.path,
        "status": trace.status,
        "seconds": round(trace.seconds, 4),
        "error": trace.error or None,
    }
    if trace.asked is not None:
        parted = trace.asked.parted
        told |= {
            "stream": trace.asked.is_stream,
            "prompt_tokens": trace.asked.prompt_tokens,
            "cached_tokens": trace.cached_tokens,
            "miss": trace.miss or None,
            "parted_at": parted.at if parted else None,
            "parted_in": parted.where if parted else None,
            "first_token_s": rounded(trace.first_token_s),
            "completion_tokens": trace.completion_tokens,
            "tokens_per_s": rounded(trace.tokens_per_s),
        }
    return {name: value for name, value in told.items() if value is not None}


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _prompt(trace: Trace) -> str:
    assert trace.asked is not None
    text = f"prompt {trace.asked.prompt_tokens:,}"
    if trace.cached_tokens is None:
        return text
    parted = trace.asked.parted
    where = f" at {parted.at:,}{' in a reply' if parted.where == 'reply' else ''}" if parted else ""
    why = f" ({trace.miss}{where})" if trace.miss else ""
    return f"{text}, {trace.cached_tokens:,} cached{why}"
