"""Exact replay: replies are remembered as sampled tokens, so that later prompts repeat them token for token."""
