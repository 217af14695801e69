"""Replies that are remembered as they were sampled, so that they come back into prompts token for token."""
