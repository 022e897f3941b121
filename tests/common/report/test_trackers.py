"""Trackers: the same numbers everywhere, and a run that goes on whatever a tracker does."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from mpbridge.common.errors import UnknownName
from mpbridge.common.report import trackers
from mpbridge.common.report.metrics import MetricsLog, read

Patch, Said = pytest.MonkeyPatch, pytest.CaptureFixture[str]


def write(folder: Path, steps: range, names: list[str], after: int = 0, **section: Any) -> None:
    log = MetricsLog(folder, logger={"trackers": names, **section}, recipe="bf16_mixed", after=after)
    for step in steps:
        log.write({"iteration": step, "loss": 4.0 / step, "grad_norm": float("nan"), "applied": True})
        log.track({"iteration": step, "precision/sqnr_min": 20.0 + step})
    log.close()


class Fake:
    """A tracker that takes everything."""

    def __init__(self, place: Any) -> None:
        pass

    def log(self, step: int, values: Any) -> None:
        pass

    def close(self) -> None:
        pass


def test_trackers_take_the_steps_that_are_printed(tmp_path: Path, monkeypatch: Patch) -> None:
    seen: list[int] = []

    class Board(Fake):
        def log(self, step: int, values: Any) -> None:
            seen.append(step)

    monkeypatch.setattr(trackers, "TRACKERS", {"board": (Board, "")})
    log = MetricsLog(tmp_path, logger={"trackers": ["board"]})
    for step in range(1, 7):
        log.write({"iteration": step, "loss": 1.0 / step}, board=step in (1, 5))
        if step == 4:
            log.track({"iteration": step, "precision/sqnr_min": 20.0})
    log.close()
    assert seen == [1, 4, 5]


def test_an_unknown_tracker_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="wandb"):
        MetricsLog(tmp_path / "run", logger={"trackers": ["wanb"]})
    assert not (tmp_path / "run").exists()


def test_a_tracker_that_is_not_installed_is_said_once(tmp_path: Path, monkeypatch: Patch, capsys: Said) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    write(tmp_path, range(1, 4), ["wandb"])
    said = capsys.readouterr().err
    assert said.count("wandb") == said.count("pip install -e '.[wandb]'") * 2 + said.count("import of wandb")
    assert said.count("the run continues without it") == 1
    assert len(read(tmp_path / "metrics.jsonl")) == 3


def test_a_tracker_that_breaks_or_hangs_stops_nothing(tmp_path: Path, monkeypatch: Patch, capsys: Said) -> None:
    release = threading.Event()

    class Breaks(Fake):
        def log(self, step: int, values: Any) -> None:
            raise ConnectionError("no route to the server")

    class Hangs(Fake):
        def log(self, step: int, values: Any) -> None:
            release.wait(60)

    monkeypatch.setattr(trackers, "TRACKERS", {"breaks": (Breaks, "x"), "hangs": (Hangs, "x")})
    monkeypatch.setattr(trackers.TrackerThread.__init__, "__kwdefaults__", {"say": trackers.warn, "wait": 0.2})
    write(tmp_path, range(1, 4), ["breaks", "hangs"])
    said = capsys.readouterr().err.splitlines()
    release.set()
    assert len(said) == 2
    assert "no route to the server" in said[0]
    assert "did not accept its last numbers" in said[1]
    assert len(read(tmp_path / "metrics.jsonl")) == 3


@pytest.mark.parametrize("given_up", [False, True])
def test_a_tracker_whose_queue_is_full_at_the_end_is_closed(
    tmp_path: Path, monkeypatch: Patch, capsys: Said, given_up: bool
) -> None:
    taken: list[int] = []
    begun, go_on, closed = threading.Event(), threading.Event(), threading.Event()

    class Slow(Fake):
        def __init__(self, place: Any) -> None:
            begun.set()

        def log(self, step: int, values: Any) -> None:
            go_on.wait(60)
            taken.append(step)

        def close(self) -> None:
            closed.set()

    monkeypatch.setattr(trackers, "TRACKERS", {"slow": (Slow, "x")})
    monkeypatch.setattr(trackers, "WAITING", 5)
    one = trackers.TrackerThread("slow", trackers.TrackedRun(tmp_path, {}), wait=60.0)
    assert begun.wait(60)
    one.log(1, {"loss": 1.0})
    while not one._lines.empty():
        time.sleep(0.01)
    for step in range(2, 8 if given_up else 7):
        one.log(step, {"loss": 1.0})
    threading.Timer(0.5, go_on.set).start()
    one.close()
    assert closed.is_set()
    assert taken == ([1] if given_up else [1, 2, 3, 4, 5, 6])
    assert ("is too slow" in capsys.readouterr().err) is given_up


def test_a_server_is_asked_before_its_library_tries_for_minutes() -> None:
    class NotHere(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), NotHere) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        trackers.require_answer(url, seconds=60)  # any answer is one
        server.shutdown()
    with pytest.raises(ConnectionError, match=f"{url} cannot be reached .*refused"):
        trackers.require_answer(url, seconds=60)


@pytest.mark.filterwarnings("ignore")
def test_wandb_offline_keeps_its_files_and_its_run(tmp_path: Path, capsys: Said) -> None:
    pytest.importorskip("wandb", reason="needs the extra wandb")
    write(tmp_path, range(1, 4), ["wandb"])
    assert capsys.readouterr().err == ""
    (found,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    identity = json.loads((tmp_path / "trackers.json").read_text())["wandb"]
    assert identity in found.name
    # its own process writes the file, on a busy machine some time after `finish`
    for _ in range(300):
        if found.stat().st_size > 500:
            break
        time.sleep(0.2)
    assert found.stat().st_size > 500


@pytest.mark.filterwarnings("ignore")
def test_mlflow_keeps_its_numbers_in_sqlite_and_goes_on_in_the_same_run(tmp_path: Path, capsys: Said) -> None:
    pytest.importorskip("mlflow", reason="needs the extra mlflow")
    from mlflow import MlflowClient

    write(tmp_path, range(1, 4), ["mlflow"], project="trial")
    write(tmp_path, range(4, 6), ["mlflow"], after=3, project="trial")
    assert capsys.readouterr().err == ""
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("trial")
    (run,) = client.search_runs([experiment.experiment_id])
    losses = client.get_metric_history(run.info.run_id, "loss")
    assert [(one.step, one.value) for one in losses] == [(step, 4.0 / step) for step in range(1, 6)]
    assert run.data.tags["recipe"] == "bf16_mixed"


@pytest.mark.parametrize("silent", [False, True], ids=["refuses", "never answers"])
def test_a_server_that_cannot_be_reached_costs_a_run_neither_minutes_nor_its_numbers(
    tmp_path: Path, monkeypatch: Patch, capsys: Said, silent: bool
) -> None:
    """Needs no mlflow: the server is asked before its library is imported, which on a busy machine takes as long as its attempts."""
    monkeypatch.setattr(trackers, "ANSWER", 0.5)
    for name in ("MAX_RETRIES", "TIMEOUT"):
        monkeypatch.setenv(f"MLFLOW_HTTP_REQUEST_{name}", "3")  # the user's own stay
    known = set(sys.modules)
    with socket.socket() as box:
        box.bind(("127.0.0.1", 0))
        if silent:
            box.listen()
        begun = time.monotonic()
        write(tmp_path, range(1, 13), ["mlflow"], mlflow_uri=f"http://127.0.0.1:{box.getsockname()[1]}")
        assert time.monotonic() - begun < 60
    (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("tracker")]
    assert "cannot be reached" in said
    assert "the run continues without it" in said
    assert len(read(tmp_path / "metrics.jsonl")) == 12
    assert "mlflow" not in set(sys.modules) - known
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "3"


@pytest.mark.filterwarnings("ignore")
def test_a_server_that_goes_away_is_given_up_soon(tmp_path: Path, monkeypatch: Patch, capsys: Said) -> None:
    """Nobody else's settings: it answers the first question, and none of MLflow's."""
    pytest.importorskip("mlflow", reason="needs the extra mlflow")
    for name in ("MAX_RETRIES", "TIMEOUT"):
        monkeypatch.setenv(f"MLFLOW_HTTP_REQUEST_{name}", "")
        monkeypatch.delenv(f"MLFLOW_HTTP_REQUEST_{name}")
    monkeypatch.setattr(trackers, "require_answer", lambda url, *, seconds: None)
    begun = time.monotonic()
    write(tmp_path, range(1, 13), ["mlflow"], mlflow_uri="http://127.0.0.1:9")
    assert time.monotonic() - begun < 60
    (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("tracker")]
    assert "the run continues without it" in said
    assert len(read(tmp_path / "metrics.jsonl")) == 12
