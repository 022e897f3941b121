"""`pytest -p mpbridge.te_cpu.pytest_plugin --played h100`: a test run in which Transformer Engine works without a GPU.

When loaded with -p, it takes effect before conftest files and test modules are imported, so that they see a GPU. If the command line cannot be
changed, set PYTEST_ADDOPTS="-p mpbridge.te_cpu.pytest_plugin --played h100"; MPBRIDGE_PLAYED and MPBRIDGE_TE are the options' defaults.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any

import pytest

from mpbridge.common.errors import MpbridgeError

_STACK = ExitStack()


def pytest_addoption(parser: Any) -> None:
    """--played and --te."""
    group = parser.getgroup("mpbridge", "Transformer Engine on a CPU")
    group.addoption(
        "--played",
        metavar="GPU",
        default=os.environ.get("MPBRIDGE_PLAYED", "h100"),
        help="the machine to play (default: h100)",
    )
    group.addoption(
        "--te",
        metavar="X.Y",
        default=os.environ.get("MPBRIDGE_TE"),
        help="the Transformer Engine release (default: the installed one)",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: Any) -> None:
    """Enters the context before any test module is imported."""
    from mpbridge.te_cpu.context import transformer_engine_on_cpu
    from mpbridge.te_cpu.foreign import foreign_code

    options = early_config.known_args_namespace
    try:
        _STACK.enter_context(transformer_engine_on_cpu(options.played, te=options.te))
    except MpbridgeError as error:
        raise pytest.UsageError(str(error)) from error
    _STACK.enter_context(foreign_code(connections=False))


def pytest_report_header() -> str:
    """One line with the played machine and release."""
    from mpbridge.te_cpu.played import now

    played = now()
    return (
        f"mpbridge: Transformer Engine {'.'.join(map(str, played.release))} on the CPU, playing {played.machine.label}"
    )


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """Restores everything."""
    _STACK.close()
