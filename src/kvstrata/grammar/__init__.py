"""What a reply may be: constraints, compiled for a model's tokenizer by llguidance, and followed token by token.

Knows tokenizers. Does not know requests, HTTP or how tokens are drawn.
"""
