"""Replicas on Ray Serve. Only this folder knows Ray."""
