"""The disk tier: blocks in a folder. Knows keys, bytes and files; no MLX arrays, codecs, layers or models.

`tier.py` has the entry point, `DiskTier`; its settings are in `tiers/options.py`.

    writer, block_store      write a block to a file, keep files and rows in step
    loading, reader          read a block back, verified
    chains                   blocks on the disk or in the queue, and chains of them
    index, catalogue, scan   rows in memory, rows in SQLite, rows compared with files
    space                    space that the cache takes on the volume, and evictions
    folder, filesystem       names in the folder and quarantine, every file operation
    errors, inspect          reasons that are counted, the folder without a server
"""
