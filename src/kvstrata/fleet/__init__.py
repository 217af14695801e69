"""Several servers of one model behind one address. Uses reports of cached prefixes and load; holds no KV itself."""
