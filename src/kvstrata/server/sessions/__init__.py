"""Sessions: recognition of requests that belong together, and the state kept about them. Calls no engine."""
