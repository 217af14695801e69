"""A conversation as one file that another machine takes: the layout of that file, and everything that makes it trusted.

Knows bytes, checksums and the blocks of `disk/format.py`; knows no arrays, no store and no HTTP.
"""
