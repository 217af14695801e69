"""The disk tier: blocks in a folder. Knows keys, bytes and files; no MLX arrays, codecs, layers or models.

`tier.py` has the entry point, `DiskTier`; its settings are in `tiers/options.py`.

    writer, block_store      write blocks to files, keep files and records in step
    reader                   read and verify blocks
    chains                   blocks on the disk or in the queue, and chains of them
    index, catalogue, scan   records in memory, their copy in SQLite, comparison of records and files
    space                    allocated bytes on the volume, and evictions
    folder, filesystem       names in the folder, lock, quarantine and markers; every file operation
    errors, inspect          counted reasons; inspection of a folder without a server
"""
