"""Constrained decoding: constraints compiled by llguidance for a model's tokenizer, and matched token by token.

Knows tokenizers. Does not know requests, HTTP or sampling.
"""
