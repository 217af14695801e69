"""OpenAI's chat, completions and models APIs."""
