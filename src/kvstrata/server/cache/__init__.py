"""Routes under /cache."""
