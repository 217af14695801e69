"""The live cache of one layer, as mlx-lm models call it, and attention over its parts.

Knows arrays, tokens and one forward pass at a time. Does not know requests, text, files or who shares what.
"""
