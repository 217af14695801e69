"""Several servers of one model behind one address. Knows what replicas hold and how busy they are; owns no KV."""
