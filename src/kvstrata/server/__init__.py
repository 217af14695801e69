"""HTTP. Knows requests, text and how to wait for the engine; knows no arrays."""
