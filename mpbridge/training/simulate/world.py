"""Simulated ranks, each in a separate process: megatron-core's parallel state is process-wide."""

from __future__ import annotations

import dataclasses
import importlib
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any, Self

from mpbridge.common.errors import BadValue, MpbridgeError, Refused
from mpbridge.common.machines import machine
from mpbridge.common.traits import DEFAULT
from mpbridge.planning.outlook import Outlook
from mpbridge.settings.container import ConfigContainer, Run
from mpbridge.training.simulate import Simulated

_CUDA_ONLY: dict[str, Any] = {
    "tp_comm_overlap": False, "cpu_offloading": False, "cpu_offloading_num_layers": 0, "moe_grouped_gemm": False, "moe_permute_fusion": False,
    "gradient_accumulation_fusion": False, "masked_softmax_fusion": False, "apply_rope_fusion": False, "cross_entropy_loss_fusion": False,
    "bias_dropout_fusion": False, "bias_activation_fusion": False, "moe_router_fusion": False, "cuda_graph_impl": "none", "recompute_granularity": None,
    "recompute_modules": None, "recompute_method": None, "recompute_num_layers": None, "overlap_moe_expert_parallel_comm": False,
    "transformer_impl": "local", "defer_embedding_wgrad_compute": False,
}  # fmt: skip
"""Model settings that need a kernel, and their replacements: none of them affects states."""
_TE_BUILDS = ("transformer_impl", "moe_grouped_gemm")
"""Those of them that Transformer Engine's own Python can build without a kernel."""


def simulated_run(container: ConfigContainer, world: int) -> tuple[Run, tuple[str, ...]]:
    """(the Run that can be built without a GPU, what was changed for that)."""
    box = container.copy()
    model: dict[str, Any] = dict(box.model) if isinstance(box.model, dict) else {}
    if not model:
        raise BadValue("simulate needs the model section as plain settings")
    played = box.emulate == "te"
    only = {name: value for name, value in _CUDA_ONLY.items() if not (played and name in _TE_BUILDS)}
    changed = {name: value for name, value in only.items() if model.get(name) not in (None, value)}
    if model.get("moe_token_dispatcher_type") == "flex":
        changed["moe_token_dispatcher_type"] = "alltoall"
    whole: Any = {**model, **changed}
    box = dataclasses.replace(box, model=whole)
    first = box.resolved(world, machine=None if played else machine("cpu"), training=False)
    messages = [f"model.{name}={value}" for name, value in changed.items()]
    if first.policy.quantized and not played:
        # low-precision weights exist only with Transformer Engine: use high-precision storage, as the emulation does
        box = dataclasses.replace(box, emulate=True)
        first = box.resolved(world, machine=machine("cpu"), training=False)
        stored = "weights are stored in the compute dtype; --emulate te builds low-precision storage"
        messages.append(f"emulate=true ({stored})")
    if len(first.stages) > 1:
        messages.append(f"only the first of {len(first.stages)} recipes (--recipe builds another)")
    if first.engine != DEFAULT:
        raise BadValue(f"simulate builds megatron-core's own engine, found engine={first.engine}")
    return first, tuple(messages)


def simulate(run: Run, ranks: Sequence[int], *, step: bool = False) -> list[Simulated]:
    """Simulates each of those ranks. Raises BadValue for a rank outside of the world, Refused if sizes do not divide, MpbridgeError if one fails."""
    outside = [rank for rank in ranks if not 0 <= rank < run.world_size]
    if outside:
        raise BadValue(f"rank {', '.join(map(str, outside))}: the world has ranks 0 to {run.world_size - 1}")
    if undivided := Outlook(policy=run.policy, facts=run.facts).undivided:
        raise Refused(undivided)
    if step and run.played:
        raise BadValue(
            "--step with --emulate te: Transformer Engine's kernels read values, which tensors without memory do not have; drop one of the two options"
        )
    if step and run.facts.shape.experts and run.facts.dispatcher == "allgather":
        text = "it counts tokens by values, which tensors without memory do not have"
        raise BadValue(f"--step with dispatcher allgather: {text}; model.moe_token_dispatcher_type=alltoall, or drop --step")  # fmt: skip
    # not forked from here: this process may have torch threads, and a child forked from a threaded process can crash or hang
    with _Nursery() as nursery:
        return [nursery.ask(run, rank, step) for rank in ranks]


def default_ranks(run: Run) -> tuple[int, ...]:
    """First and last rank of each of the first, a middle and the last pipeline stage, at most four."""
    every = run.world_size // run.facts.parallel.pipeline
    stages = sorted({0, run.facts.parallel.pipeline // 2, run.facts.parallel.pipeline - 1})
    return tuple(sorted({*(stage * every for stage in stages), run.world_size - 1}))


class _Nursery:
    """A process that imports what every rank needs once, and forks a child per rank."""

    def __init__(self) -> None:
        ours, theirs = multiprocessing.Pipe()
        path = os.pathsep.join(dict.fromkeys(os.path.abspath(entry) for entry in sys.path))
        # megatron-core warns while it is imported of what is not installed
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _START, str(theirs.fileno())],
            env=os.environ | {"PYTHONPATH": path},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self._line = ours

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._line.close()
        self._process.wait()

    def ask(self, run: Run, rank: int, step: bool) -> Simulated:
        """The results for that rank. Raises MpbridgeError if its process failed or died."""
        try:
            self._line.send((run, rank, step))
            done = self._line.recv()
        except (EOFError, OSError):
            code = self._process.wait()
            raise MpbridgeError(
                f"the process that simulates rank {rank} ended without an answer (exit code {code})"
            ) from None
        if isinstance(done, str):
            raise MpbridgeError(f"simulated rank {rank} {done}")
        return done  # type: ignore[no-any-return]


_START = "import sys; from mpbridge.training.simulate.world import serve; serve(int(sys.argv[1]))"


def serve(line: int) -> None:
    """The main function of that process: answers (run, rank, step) with a Simulated, or the text of a failure, until the pipe is closed.

    line: file descriptor of the pipe's other end.
    """
    asked: Connection[Any, Any] = Connection(line)
    with ExitStack() as stage:
        ready = False
        while True:
            try:
                run, rank, step = asked.recv()
            except EOFError:
                return
            if not ready:
                # before megatron is imported, since megatron decides then whether there is a Transformer Engine
                failed = _enter(stage, run)
                ready = not failed
            asked.send(failed or _apart(run, rank, step))


def _enter(stage: ExitStack, run: Run) -> str:
    """Sets up everything that the ranks of a run inherit; returns the text of a failure, or ''."""
    try:
        if run.played:
            # before torch's factories are wrapped, since a default device would otherwise not reach them
            importlib.import_module("torch.utils._device")._device_constructors()
            stage.enter_context(importlib.import_module("mpbridge.te_cpu.context").stage_of(run))
        importlib.import_module("mpbridge.backend.megatron.process").import_all()
        importlib.import_module("mpbridge.training.simulate.rank")
    except MpbridgeError as error:
        return f"cannot be built: {error}"
    return ""


def _apart(run: Run, rank: int, step: bool) -> Simulated | str:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(theirs, run, rank, step), daemon=True)
    child.start()
    theirs.close()
    try:
        return ours.recv()  # type: ignore[no-any-return]
    except EOFError:
        child.join()
        return f"ended without an answer (exit code {child.exitcode})"
    finally:
        child.join()


def _child(answer: Any, run: Run, rank: int, step: bool) -> None:
    try:
        from mpbridge.training.simulate.rank import simulate_rank

        answer.send(simulate_rank(run, rank, step=step))
    except BaseException as error:
        import traceback

        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/torch/" not in frame.filename]
        where = "; ".join(f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in frames[-3:])
        answer.send(f"failed: {type(error).__name__}: {error} ({where})")
    answer.close()
