"""Requests that belong together: how they are recognised, and what is remembered of them. Asks no engine."""
