"""The request journal: a trace of each request, log lines, and an hour of history for the dashboard."""
