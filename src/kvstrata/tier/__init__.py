"""What a tier is: a place outside memory where blocks rest. The interface, its values, and what every tier can use.

Knows keys and bytes; no files, MLX arrays, codecs, layers or models. `base.py` is what the store asks of a tier,
`nothing.py` the tier of a server that has none, `kvstrata/disk` the one that there is.
"""
