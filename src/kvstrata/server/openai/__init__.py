"""OpenAI's endpoints: schema (what may be asked), ask (to engine requests), replies (to JSON), stream (to events)."""
