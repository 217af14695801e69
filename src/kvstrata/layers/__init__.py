"""The live cache of one layer, as mlx-lm models call it.

Knows arrays, tokens and one forward pass at a time. Does not know requests, text, files or who shares what.
"""
