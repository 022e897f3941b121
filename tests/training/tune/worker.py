"""One rank of `mpbridge tune`, whatever its verdict."""

from __future__ import annotations

import sys

from mpbridge.cli.main import main

if __name__ == "__main__":
    code = main(["tune", *sys.argv[1:]])
    sys.exit(0 if code in (0, 1) else code)
