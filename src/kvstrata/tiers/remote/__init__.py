"""A tier that several servers share: blocks in Valkey, Redis, an object store or a shared folder.

Knows keys and bytes; no MLX arrays, codecs, layers or models. `url.py` says where, `secret.py`, `names.py` and
`seal.py` say whom it trusts, `stores/` asks each kind of store, `sealed.py` keeps blocks in one, and `tier.py`
implements `tiers/interface.py` on it.
"""
