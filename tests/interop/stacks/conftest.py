"""What the tests of stacks share: the command line, and files that it reads."""

from __future__ import annotations

import pytest

from mpbridge.cli.main import main


@pytest.fixture
def cli(capsys):
    """Runs a command, whose exit code is among `code`; returns its answer, or the error that ended it, as it is or without line breaks."""

    def run(*words, code=0, joined=False):
        ended = main([*map(str, words)])
        assert ended in (code if isinstance(code, tuple) else (code,))
        answer, error = capsys.readouterr()
        assert bool(error) is (ended == 2)
        printed = error or answer
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
