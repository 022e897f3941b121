"""`pytest -p mpbridge.te_cpu.pytest_plugin --played h100`: a test run in which Transformer Engine works without a GPU.

When loaded with -p, it takes effect before conftest files and test modules are imported, so that they see a GPU. If the command line cannot be
changed, set PYTEST_ADDOPTS="-p mpbridge.te_cpu.pytest_plugin --played h100"; MPBRIDGE_PLAYED and MPBRIDGE_TE are the options' defaults.
"""

import atexit
import os
from contextlib import ExitStack
from typing import Any

import pytest

from mpbridge.common.errors import MpbridgeError
from mpbridge.te_cpu.context import transformer_engine_on_cpu
from mpbridge.te_cpu.foreign import foreign_code
from mpbridge.te_cpu.played import now
from mpbridge.te_cpu.ranks import GRACE, Merged, Ranks

_STACK = ExitStack()
atexit.register(_STACK.close)  # after a conftest that fails, pytest unconfigures nothing


def pytest_addoption(parser: Any) -> None:
    """--played and --te."""
    group = parser.getgroup("mpbridge", "Transformer Engine on a CPU")
    for name, metavar, kind, default, words in (
        ("played", "GPU", str, os.environ.get("MPBRIDGE_PLAYED", "h100"), "the machine to play (default: h100)"),
        ("te", "X.Y", str, os.environ.get("MPBRIDGE_TE"), "the Transformer Engine release (default: the installed one)"),
        ("ranks", "N", int, 1, "run every test on N ranks of a world that is started here (gloo for NCCL); without it, one process, or the world of a launcher"),
        ("ranks-grace", "S", float, GRACE, "seconds that the other ranks have after one has failed; then their world is ended and named in the report (default: %(default)s)"),
    ):  # fmt: skip
        group.addoption(f"--{name}", metavar=metavar, type=kind, default=default, help=words)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: Any) -> None:
    """Enters the context before any test module is imported."""
    options = early_config.known_args_namespace
    try:
        _STACK.enter_context(transformer_engine_on_cpu(options.played, te=options.te))
    except MpbridgeError as error:
        raise pytest.UsageError(str(error)) from error
    _STACK.enter_context(foreign_code(connections=False))


@pytest.hookimpl(trylast=True)
def pytest_configure(config: Any) -> None:
    """With --ranks, the tests are collected and run by the ranks alone."""
    if config.getoption("ranks") > 1 and "MPBRIDGE_RANK" not in os.environ:
        config.pluginmanager.register(_World(config), "mpbridge-ranks")


class _World:
    """Replaces collection and run by the reports of the ranks."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> bool:
        """Nothing is collected here."""
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: Any) -> bool:
        """Hands the ranks' reports to the reporters of this run."""
        option, played = self.config.option, now()
        with Ranks(option.ranks, played.machine.name, played.text, grace=option.ranks_grace) as ranks:
            for merged in ranks.run([*map(str, self.config.invocation_params.args)]):
                session.testscollected += 1
                session.testsfailed += merged.outcome == "failed"
                self._report(merged)
                if session.testsfailed >= (self.config.getvalue("maxfail") or float("inf")):
                    raise session.Failed(f"stopping after {session.testsfailed} failures")
        return True

    def _report(self, merged: Merged) -> None:
        hook = self.config.hook
        if merged.module:
            why: Any = (merged.test, 0, merged.text) if merged.outcome == "skipped" else merged.text
            hook.pytest_collectreport(report=pytest.CollectReport(merged.test, merged.outcome, why, []))  # type: ignore[arg-type]
            return
        hook.pytest_runtest_logstart(nodeid=merged.test, location=merged.location)
        for phase in merged.phases:
            if isinstance(phase["longrepr"], list):  # of a skip: JSON knows no tuples, and pytest asks for one
                phase["longrepr"] = tuple(phase["longrepr"])
            report = hook.pytest_report_from_serializable(config=self.config, data=phase)
            hook.pytest_runtest_logreport(report=report)
        hook.pytest_runtest_logfinish(nodeid=merged.test, location=merged.location)


def pytest_report_header() -> str:
    """One line with the played machine and release."""
    return f"mpbridge: Transformer Engine {now().text} on the CPU, playing {now().machine.label}"


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """Restores everything."""
    _STACK.close()
