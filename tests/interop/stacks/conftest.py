"""What the tests of stacks share: the command line, and files that it reads."""

from __future__ import annotations

import pytest

from mpbridge.cli.main import main


@pytest.fixture
def cli(capsys):
    """Runs a command, whose exit code is among `code`; returns all that it printed, as it is or without line breaks."""

    def run(*words, code=0, joined=False):
        assert main([*map(str, words)]) in (code if isinstance(code, tuple) else (code,))
        printed = "".join(capsys.readouterr())
        return " ".join(printed.split()) if joined else printed

    return run


@pytest.fixture
def file(tmp_path):
    """Writes a file of that name; returns its path."""

    def write(name, text):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write
