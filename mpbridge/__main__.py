"""`python -m mpbridge` is `mpbridge`."""

from mpbridge.cli.main import entry

if __name__ == "__main__":
    entry()
