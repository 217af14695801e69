"""The HTTP server: requests, prompt text and replies of the engine. Handles no arrays."""
