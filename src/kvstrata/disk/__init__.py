"""Where bytes rest when memory is short. Knows keys, bytes and files; no MLX arrays, codecs, layers or models.

`disk.py` is the door: `DiskTier`. A block is in `block.py`, its file in `format.py` and docs/format.md.
"""
