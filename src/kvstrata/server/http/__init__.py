"""HTTP without APIs: connections, bodies, access, errors."""
