"""Anthropic's Messages API: its words for requests, replies and errors."""
