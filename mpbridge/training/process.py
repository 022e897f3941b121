"""What a run does to its process, and restores: the process group, threads, determinism; signals, which end it after the current step, and the loss of another rank; and an engine with a
checkpoint's weights, to measure on."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mpbridge.backend.devices import device_layer
from mpbridge.backend.devices.collectives import agreed, is_of_a_lost_rank
from mpbridge.backend.engines.contract import StepResult
from mpbridge.backend.engines.optimizers import CpuFusedAdam
from mpbridge.backend.engines.parallel import start_process_group, stop_process_group
from mpbridge.backend.engines.registry import build_engine
from mpbridge.common.errors import MpbridgeError, Refused
from mpbridge.common.report.metrics import record
from mpbridge.common.traits import DEFAULT
from mpbridge.settings.container import ConfigContainer, Run
from mpbridge.settings.training import ANNOUNCED
from mpbridge.training.base import Counters, Hook, Training
from mpbridge.training.checkpoint.io import load
from mpbridge.training.checkpoint.writer import end_with_parent


@contextmanager
def process_group(cuda: bool, *, minutes: float = 60.0) -> Iterator[None]:
    """The job's process group, for the duration of the run; an existing one is used and left alone. minutes: timeout of collectives."""
    made = start_process_group(cuda, timeout_minutes=minutes)
    try:
        yield
    finally:
        if made:
            stop_process_group()


@contextmanager
def process_settings(train: Mapping[str, Any]) -> Iterator[None]:
    """`train.threads` (torch's threads for one operation) and `train.deterministic`, for the duration of the run."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    if train.get("threads"):
        torch.set_num_threads(int(train["threads"]))
    if train.get("deterministic"):
        # warn only: megatron-core uses operations that have no deterministic form on CUDA
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)


def data_parallel() -> tuple[int, int]:
    """This rank's index among those that read different data, and their number."""
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        return parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    return dist.get_rank(), dist.get_world_size()


def bare(container: ConfigContainer) -> ConfigContainer:
    """A copy whose run is measured: emulated, on an engine that does not shard gradients, without an update, checkpoints and files."""
    made = container.copy()
    made.emulate, made.engine = True, DEFAULT
    made.ddp, made.optimizer = {}, {"lr": 1.0}  # what of them a gradient depends on is the recipe's
    made.checkpoint, made.logger = {}, {"log_dir": None, "tensorboard": False, "progress": False}
    return made


@contextmanager
def with_weights(run: Run, weights: Path | None, *, cuda: bool) -> Iterator[Any]:
    """The engine of `run`, with the weights of that checkpoint. Requires a process group."""
    with process_settings(run.train), device_layer(cuda, fused_adam=CpuFusedAdam), closing(build_engine(run)) as engine:
        if weights is not None:
            # loading weights alone touches neither schedule nor data
            blank: Any = None
            training = Training(run=run, engine=engine, scheduler=blank, feed=blank, counters=Counters())
            load(training, weights, weights_alone=True)
        yield engine


_launcher = [os.getppid()]
"""The parent process at import time: if it dies while the run is built, this process gets another parent."""
os.register_at_fork(after_in_child=lambda: _launcher.__setitem__(0, os.getppid()))


class LostRank(Refused):
    """Another rank of the job died or hangs."""


class Signals(Hook):
    """Signals end the run after the current step, on all ranks at the same step, with a checkpoint.

    SIGTERM and SIGINT: a second one ends the process immediately. SIGHUP, SIGUSR1 and SIGUSR2 (Slurm's notice) may be repeated. A signal
    inherited as ignored stays ignored (nohup), unless the environment announces it. Under torchrun, a dying launcher also notifies its ranks.
    """

    URGENT = (signal.SIGTERM, signal.SIGINT)
    NOTICES = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

    def __init__(self) -> None:
        self.seen = 0
        self._urgent_at: float | None = None
        self._kept: dict[int, Any] = {}

    def built(self, training: Training) -> None:
        """Installs the handlers, if this is the main thread."""
        if self._kept or threading.current_thread() is not threading.main_thread():
            return
        for number in (*self.URGENT, *self.NOTICES):
            if signal.getsignal(number) is not signal.SIG_IGN or number.name == f"SIG{os.environ.get(ANNOUNCED)}":
                self._kept[number] = signal.signal(number, self._note)
        if under_torchrun() and (notice := next((n for n in self.NOTICES if n in self._kept), None)):
            end_with_parent(notice)
            if os.getppid() != _launcher[0]:  # it died before the request
                self.seen = notice

    def _note(self, number: int, frame: Any) -> None:
        self.seen = self.seen or number
        if number not in self.URGENT:
            return
        now = time.monotonic()
        if not under_torchrun():
            # use the default handler from now on, so that a second signal works even while Python is blocked
            self._restore_urgent()
        elif self._urgent_at is not None and now - self._urgent_at > PASSED_ON_WITHIN:
            self._restore_urgent()
            os.kill(os.getpid(), number)
        self._urgent_at = self._urgent_at or now

    def _restore_urgent(self) -> None:
        for known in self.URGENT:
            if known in self._kept:
                signal.signal(known, signal.SIG_DFL)

    def started(self, training: Training) -> None:
        """Handles a signal that arrived while the run was built or loaded."""
        self._stop(training)

    def stepped(self, training: Training, result: StepResult) -> None:
        """Stops all ranks if one of them received a signal or cannot write its files."""
        self._stop(training)

    def _stop(self, training: Training) -> None:
        found = agreed(TROUBLE if training.trouble else self.seen)
        if not found or training.stop is not None:
            return
        if found == TROUBLE:
            training.stop = training.trouble or "another rank cannot write its files"
            record(training, "trouble", f"{training.stop}: the step was completed, the run stops")
        else:
            training.stop = signal.Signals(found).name
            record(training, "signal", f"{training.stop}: the step was completed, the run stops")

    def closed(self) -> None:
        """Restores the handlers."""
        for number, kept in self._kept.items():
            signal.signal(number, kept)
        if self._kept and under_torchrun():
            end_with_parent(0)
        self._kept = {}


TROUBLE = 1000
"""Code larger than any signal number: files cannot be written."""
PASSED_ON_WITHIN = 5.0
"""Seconds within which torchrun may pass on a signal that the terminal also sent to its ranks; not a second request."""


def under_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


@contextmanager
def explained() -> Iterator[None]:
    """Converts what a process group raises for a lost rank to LostRank."""
    try:
        yield
    except MpbridgeError:
        raise
    except RuntimeError as error:
        if is_of_a_lost_rank(error):
            raise LostRank(
                f"rank {dist.get_rank()}: another rank of the job died or does not answer ({str(error).splitlines()[0][:200]}). "
                "Restart the job from its newest checkpoint (checkpoint.load=...); the reason is in that rank's output"
            ) from error
        raise
