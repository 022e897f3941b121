"""Checkpoints as megatron-core's dist_checkpointing writes them, from a test's process."""

from __future__ import annotations

import contextlib
import queue
from pathlib import Path
from typing import Any
from unittest import mock


def _in_this_process(transforms: Any, use_msc: bool, rank: int, buckets: list[Any], results: Any) -> None:
    """FileSystemWriterAsync.write_preloaded_data_multiproc without its forks: the same writer for each bucket, one after the other."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    written: dict[int, Any] = {}
    for number, bucket in enumerate(buckets):
        done: queue.Queue[Any] = queue.Queue()
        counted: queue.Queue[int] = queue.Queue()
        counted.put(number)
        FileSystemWriterAsync.write_preloaded_data(transforms, number, bucket, done, counted, True)
        _, written[number] = done.get_nowait()
        if isinstance(written[number], Exception):
            raise written[number]
    results.put(written)


def save(state: dict[str, Any], folder: Path) -> None:
    """megatron-core's own save, byte for byte, into `folder` (must exist).

    The default writer of 0.16.1 forks a process a bucket and waits for them without end. A test process has threads of torch, so a fork can die
    in a lock or a native crash, and the save then hangs until pytest's limit. That of 0.20 has threads.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    writer, forks = filesystem_async.FileSystemWriterAsync, "write_preloaded_data_multiproc"
    with contextlib.ExitStack() as patched:
        if hasattr(writer, forks):
            patched.enter_context(mock.patch.object(writer, forks, staticmethod(_in_this_process)))
            patched.enter_context(mock.patch.object(filesystem_async, "_results_queue", queue.Queue()))
        dist_checkpointing.save(state, str(folder))
