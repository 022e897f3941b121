"""Trackers that receive a run's numbers in addition to metrics.jsonl: TensorBoard, Weights & Biases, MLflow, with one interface.

Trackers are optional: one that is not installed, fails or cannot be reached is reported once on stderr, and the run continues without it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from mpbridge.common.errors import UnknownName
from mpbridge.common.files import folder_inside, text_of, write
from mpbridge.common.report.console import warn
from mpbridge.common.shipped import install

WAIT = 120.0
"""Seconds that the end of a run waits for a tracker to take its last numbers."""
ANSWER = 10.0
"""Seconds within which a server has to answer at the start, before its library is imported: W&B's own attempts and MLflow's take minutes, and hold up the end of the run."""
FAREWELL = 5.0
"""Seconds that an abandoned tracker has to close its files."""
WAITING = 10_000
"""Maximum number of lines queued for a slow tracker; later ones are dropped, which is reported."""


class Tracker(Protocol):
    """Receives numbers by step. Created once per run, on rank 0."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Writes one line; `values` are finite."""

    def close(self) -> None:
        """Returns once everything is written."""


class TrackedRun:
    """What a tracker knows about the run. after: the last finished step of the run being continued, 0 for a new one."""

    def __init__(self, folder: Path, section: Mapping[str, Any], *, recipe: str = "", after: int = 0) -> None:
        self.folder, self.section, self.recipe, self.after = folder, section, recipe, after
        self.project = str(section.get("project") or "mpbridge")
        self.name = str(section.get("name") or f"{recipe or 'run'} {folder.resolve().name}")

    def identity(self, tracker: str) -> str | None:
        """The continued run's previous id in that tracker; None for a new run."""
        return self._known().get(tracker) if self.after else None

    def remember(self, tracker: str, identity: str) -> None:
        """Stores the id so that the run can be continued."""
        known = self._known() | {tracker: identity}
        write(self.folder / "trackers.json", json.dumps(known, indent=1) + "\n")

    def _known(self) -> dict[str, str]:
        try:
            found = json.loads(text_of(self.folder / "trackers.json"))
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}


class TensorBoard:
    """Event files under log_dir/tensorboard."""

    def __init__(self, place: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # purge_step hides the events of steps that will be repeated
        again = place.after + 1 if place.after else None
        self._writer: Any = SummaryWriter(str(folder_inside(place.folder, "tensorboard")), purge_step=again)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See Tracker."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """See Tracker."""
        self._writer.close()


def require_answer(url: str, *, seconds: float) -> None:
    """Raises ConnectionError if no server answers at `url`; any answer will do. Proxies are taken from the environment."""
    import http.client
    import ssl
    import urllib.error
    import urllib.request

    try:
        urllib.request.urlopen(url, timeout=seconds).close()
    except urllib.error.HTTPError:
        return
    except (OSError, http.client.HTTPException) as error:
        why = getattr(error, "reason", error)
        if not isinstance(why, (ssl.SSLError, http.client.HTTPException)):  # a server answered; the library decides
            raise ConnectionError(f"{url} cannot be reached ({why})") from None


class Wandb:
    """Weights & Biases; offline it writes log_dir/wandb, which `wandb sync` uploads."""

    def __init__(self, place: TrackedRun) -> None:
        import wandb

        mode = str(place.section.get("wandb_mode") or "offline")
        if mode == "online":
            require_answer(str(wandb.setup().settings.base_url), seconds=ANSWER)
        identity = place.identity("wandb")
        place.folder.mkdir(parents=True, exist_ok=True)
        self._run: Any = wandb.init(
            project=place.project,
            name=place.name,
            dir=str(folder_inside(place.folder, "wandb").parent),
            mode=mode,
            id=identity,
            resume="allow" if identity and mode == "online" else None,
            config={"recipe": place.recipe},
            settings=wandb.Settings(silent=True, init_timeout=30.0),
        )
        place.remember("wandb", self._run.id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See Tracker."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """See Tracker."""
        self._run.finish()


class Mlflow:
    """MLflow; without a tracking URI its store is log_dir/mlflow.db (SQLite; MLflow 3.17 refuses the older store of plain files)."""

    def __init__(self, place: TrackedRun) -> None:
        # a server that goes away later is given up soon, unless the user wants MLflow to try for longer: its own default is 7 times, for 120 s each
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", f"{ANSWER:.0f}")
        store = folder_inside(place.folder.resolve(), "mlflow.db")
        uri = place.section.get("mlflow_uri") or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{store}"
        if str(uri).startswith(("http://", "https://")):
            require_answer(str(uri), seconds=ANSWER)
        import logging

        from mlflow import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.WARNING)  # it logs every table that it creates
        self._client = MlflowClient(tracking_uri=uri)
        identity = place.identity("mlflow")
        if identity is None:
            found = self._client.get_experiment_by_name(place.project)
            if found is not None:
                experiment = found.experiment_id
            else:
                where = folder_inside(place.folder.resolve(), "mlflow").as_uri()
                experiment = self._client.create_experiment(place.project, artifact_location=where)
            made = self._client.create_run(experiment, run_name=place.name, tags={"recipe": place.recipe})
            identity = made.info.run_id
            place.remember("mlflow", identity)
        self._id = identity

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See Tracker."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(self._id, metrics=[Metric(name, value, now, step) for name, value in values.items()])

    def close(self) -> None:
        """See Tracker."""
        self._client.set_terminated(self._id)


TRACKERS: Mapping[str, tuple[Callable[[TrackedRun], Tracker], str]] = {
    "tensorboard": (TensorBoard, "tensorboard"),
    "wandb": (Wandb, "wandb"),
    "mlflow": (Mlflow, "mlflow"),
}
"""Name in logger.trackers -> tracker class, and the extra of this package that installs its library."""


def names_of(section: Mapping[str, Any]) -> list[str]:
    """The trackers that a logger section requests. Raises UnknownName for an unknown one; 'jsonl' is always written and adds nothing."""
    wanted = list(section.get("trackers") or [])
    wanted += ["tensorboard"] if section.get("tensorboard") else []
    for name in wanted:
        if name not in TRACKERS and name != "jsonl":
            raise UnknownName("tracker", str(name), [*TRACKERS, "jsonl"])
    return [name for name in dict.fromkeys(wanted) if name != "jsonl"]


def absent(name: str) -> str:
    """Why a tracker cannot be imported here; '' if its package is installed. Does not import it."""
    extra = TRACKERS[name][1]
    return f"is not installed ({install(extra)})" if find_spec(extra) is None else ""


class TrackerThread:
    """A tracker in its own thread: it is imported, opened and written there, so that training never waits for it."""

    def __init__(self, name: str, place: TrackedRun, *, wait: float = WAIT) -> None:
        self.name, self._place, self._wait = name, place, wait
        self._lines: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(WAITING)
        self._gone = False
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See Tracker; returns at once."""
        if self._gone:
            return
        try:
            self._lines.put_nowait((step, dict(values)))
        except queue.Full:
            self._lose(f"is too slow ({WAITING} lines are waiting)")

    def close(self) -> None:
        """See Tracker. A tracker that does not finish is abandoned, which is reported; one already abandoned gets only a short time."""
        until = time.monotonic() + (min(self._wait, FAREWELL) if self._gone else self._wait)
        marked = False
        while not marked and self._thread.is_alive() and time.monotonic() < until:
            with contextlib.suppress(queue.Full):  # lines are still queued: the end mark follows them
                self._lines.put(None, timeout=0.2)
                marked = True
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self._lose(f"did not accept its last numbers within {self._wait:g} seconds")

    def _work(self) -> None:
        made, extra = TRACKERS[self.name]
        try:
            tracker = made(self._place)
            while (line := self._lines.get()) is not None:
                if not self._gone:
                    tracker.log(*line)
            tracker.close()
        except ImportError as error:
            self._lose(f"is not installed ({error}; {install(extra)})")
        except Exception as error:  # any tracker error: the run continues
            self._lose(f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}")

    def _lose(self, why: str) -> None:
        if not self._gone:
            self._gone = True
            warn(f"tracker {self.name}: {why}; the run continues without it, metrics.jsonl has everything")


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The part of a line that a tracker can take: finite numbers other than the step."""
    numeric = {name: value for name, value in values.items() if isinstance(value, (int, float)) and name != "iteration"}
    return {name: float(value) for name, value in numeric.items() if math.isfinite(value)}
