"""`python -m kvstrata` is the command `kvstrata`."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    if not __package__:
        del sys.path[0]  # run as a file: `kvstrata/platform` would hide the standard library's module of that name

    from kvstrata.cli import main

    main()
