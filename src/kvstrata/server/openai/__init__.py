"""OpenAI's chat and completions: schema (what may be asked), ask (to conversations), wires (from events to answers),
answers (their types), endpoints (their paths)."""
