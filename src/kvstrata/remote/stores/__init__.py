"""The stores that a remote tier can lie in: `base.py` has the protocol, the others one kind each."""
