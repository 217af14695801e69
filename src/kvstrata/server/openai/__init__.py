"""OpenAI's chat and completions APIs: schema (request bodies), ask (translation to conversations), wires (events to
responses), answers (response types), endpoints (routes)."""
