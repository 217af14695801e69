"""One conversation inside: what every wire's requests become, and the one stream of events that every wire writes."""
