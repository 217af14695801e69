"""Arrays <-> planes: how keys and values are stored in fewer bits.

Knows arrays of shape [..., tokens, dim] and positions. Does not know layers, requests or files. Everything is frozen
and pure; there is one module for each codec, and `registry` for their names.
"""
