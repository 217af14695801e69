"""The remote tier: blocks that several servers share, in Valkey, Redis, an object store or a shared folder.

Knows keys and bytes; no MLX arrays, codecs, layers or models. `url.py` parses addresses, `sealing.py` has the secret,
names and seals. `redis_store.py`, `object_store.py` and `folder_store.py` implement `store.py`, and `open_store.py`
opens them. `block_store.py` keeps sealed blocks in a store, and `tier.py` implements `tiers/interface.py`.
"""
