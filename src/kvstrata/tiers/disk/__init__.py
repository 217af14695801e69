"""The disk as a tier: blocks in a folder. Knows keys, bytes and files; no MLX arrays, codecs, layers or models.

`tier.py` is the door: `DiskTier`, with the settings of `options.py`.

    queue, writer, publish   a block becomes a file
    loading, blockfile       and comes back, verified
    blocks                   what is there, or on its way, and chains of it
    holdings                 files and rows kept in step: records (row_index, catalogue), compare, quarantine
    space, victims           bytes that it takes, and who goes first
    format, folder, files    a block's bytes, the names in the folder, every call of the system
    inspect                  the same folder without a server
"""
