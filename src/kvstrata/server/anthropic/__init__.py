"""Anthropic's Messages API: request and response schemas, translation to conversations, and errors."""
