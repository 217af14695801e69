"""Who goes when memory runs short: what a leaf is worth, in which order leaves go, and what requests asked for before.

Knows the index. Does not know what is stored, nor how many bytes there are.
"""
