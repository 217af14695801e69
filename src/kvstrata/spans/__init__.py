"""A run of consecutive tokens over all layers: seal, cut, join, step down.

Knows layers and codecs. Does not know who wants a span, whose tokens it holds, or where it rests.
"""
