"""`python -m kvstrata` is the command `kvstrata`."""

from __future__ import annotations

from kvstrata.cli import main

if __name__ == "__main__":
    main()
