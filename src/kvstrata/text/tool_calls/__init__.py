"""Tool calls in the replies of models."""
