"""What happened: a trace of each request, lines of the log, and an hour of history for the page."""
