"""One module for each figure. Each returns plain values; the command prints them as a table or as JSON."""
