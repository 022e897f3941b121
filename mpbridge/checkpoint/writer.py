"""megatron-core's save strategy without its helper processes: writes in this process, or in one forked child while training goes on.

As shipped, the strategy starts a manager in a fresh interpreter (which imports the caller's script again), then one child a file; killed, a run leaves the
manager behind. What is written, and how, stays megatron-core's.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import multiprocessing
import queue
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from mpbridge.errors import CheckpointError

Results = Any
"""What a write comes to: index of a file -> its items, or the exception that ended it."""


def require_needs() -> None:
    """Raises CheckpointError when a package is missing without which a save would fail, or hang, at the first checkpoint."""
    if importlib.util.find_spec("psutil") is None:
        raise CheckpointError(
            "checkpoints need psutil, which megatron-core's writer imports without declaring it: pip install 'psutil>=5.9,<8'"
        )


class PlainSave(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Saves in megatron-core's format; `save` and `async_save` as there, but the request that `async_save` returns holds one plain function."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1, thread_count=1)

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        """A request whose async_fn returns the results that `finalize_fns` expect in `take`."""
        with _plain_queue():
            return super().async_save(sharded_state_dict, checkpoint_dir)

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any) -> Any:
        request = super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret)
        if request.async_fn is None:
            return request
        write, stage, results = _write, request.preload_fn, writer.results_queue
        transforms = [writer.transforms] if hasattr(writer, "transforms") else []

        def now(*_: Any) -> None:
            results.put(write(transforms, stage()))

        return _Request(request._replace(async_fn=now, preload_fn=None), transforms, stage, results)


class _Request(AsyncRequest):  # type: ignore[misc]
    """An AsyncRequest that can also be run in a forked child."""

    transforms: Any
    stage: Any
    results: Any

    def __new__(cls, request: Any, transforms: Any, stage: Any, results: Any) -> _Request:
        self: _Request = super().__new__(cls, *request)
        self.transforms, self.stage, self.results = transforms, stage, results
        return self


class Background:
    """One request under way in a forked child, which sees the tensors as they were at the fork."""

    def __init__(self, request: Any) -> None:
        self.request = request
        self._process: Any = None
        if isinstance(request, _Request):
            context = multiprocessing.get_context("fork")
            self._receive, send = context.Pipe(duplex=False)
            buckets = request.stage()
            self._process = context.Process(target=_child, args=(request.transforms, buckets, send), daemon=True)
            self._process.start()
            send.close()

    def done(self) -> bool:
        """Whether this rank's files are written, or the writer is dead."""
        return self._process is None or self._receive.poll() or not self._process.is_alive()

    def finish(self) -> None:
        """Waits for the files and writes the tables that make them a checkpoint; every rank calls it. Raises what the writer raised."""
        if self._process is not None:
            try:
                results = self._receive.recv()
            except EOFError:
                self._process.join()
                results = RuntimeError(
                    f"the process that wrote the checkpoint died (exit code {self._process.exitcode})"
                )
            self._process.join()
            self._process = None
            self.request.results.put(results)
        for finalize in self.request.finalize_fns:
            finalize()

    def abort(self) -> None:
        """Ends the child; its files stay without tables, so nobody takes them for a checkpoint."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None


def _write(transforms: Any, buckets: Any) -> Results:
    """Writes every bucket to its file, each flushed to the disk."""
    results: dict[int, Any] = {}
    for index, bucket in enumerate(buckets):
        out: queue.SimpleQueue[Any] = queue.SimpleQueue()
        count: queue.Queue[int] = queue.Queue()
        count.put(index)
        filesystem_async.FileSystemWriterAsync.write_preloaded_data(transforms, index, bucket, out, count, True)
        _, items = out.get()
        if isinstance(items, Exception):
            return items
        results[index] = items
    return results


def _child(transforms: Any, buckets: Any, send: Any) -> None:
    # the run's own handlers would save again; and a killed run must not leave a writer behind
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()
    send.send(_write(transforms, buckets))
    send.close()


def end_with_parent() -> None:
    """Asks the kernel to kill this process when its parent ends (Linux; elsewhere nothing happens)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


@contextlib.contextmanager
def _plain_queue() -> Iterator[None]:
    kept: Callable[[], Any] = filesystem_async._get_write_results_queue
    filesystem_async._get_write_results_queue = queue.Queue
    try:
        yield
    finally:
        filesystem_async._get_write_results_queue = kept
