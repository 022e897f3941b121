"""A parallel layout as settings to paste after a command."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection

from mpbridge.common.facts import RunFacts
from mpbridge.planning.estimate.candidates import NONE

PLACES = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "pipeline_model_parallel_layout",
)


def line(run: RunFacts, than: RunFacts | None = None, *, left: Collection[str] = ()) -> str:
    """The run's layout as settings to paste after a command; than: only those in which it differs from this run. left: the batch sizes that its author left to what
    follows from the layout, which another layout needs to name."""
    known = set(_settings(than)) if than is not None else set()
    if "micro_batch_size" in left and run.micro_batch_size * run.parallel.data != run.global_batch_size:
        known.discard(f"train.micro_batch_size={run.micro_batch_size}")
    made = [setting for setting in _settings(run) if setting not in known]
    if ("global_batch_size" in left and made) or (than is not None and run.global_batch_size != than.global_batch_size):
        made.append(f"train.global_batch_size={run.global_batch_size}")
    return " ".join(made)


def _settings(run: RunFacts) -> list[str]:
    sizes, parts = run.parallel, []
    for name, value in (
        ("tensor_model", sizes.tensor), ("pipeline_model", sizes.pipeline), ("virtual_pipeline_model", sizes.virtual_pipeline or "null"),
        ("context", sizes.context), ("expert_model", sizes.expert),
    ):  # fmt: skip
        parts.append(f"parallel.{name}_parallel_size={value}")
    if run.shape.experts:
        parts.append(f"parallel.expert_tensor_parallel_size={sizes.expert_tensor or 'null'}")
    parts.append(f"parallel.sequence_parallel={str(sizes.sequence).lower()}")
    parts.append(f"train.micro_batch_size={run.micro_batch_size}")
    parts += [_setting(name, run.model.get(name) or None) for name in PLACES]
    for name in ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"):
        parts.append(f"model.{name}={str(bool(run.model.get(name))).lower()}")
    parts += [_setting(name, run.model.get(name)) for name in NONE]
    parts.append(f"ddp.use_distributed_optimizer={str(run.optimizer.distributed).lower()}")
    return parts


def _setting(name: str, value: object) -> str:
    """A model setting quoted for a shell: a layout contains brackets and bars, a list of modules contains quotes."""
    text = (
        json.dumps(list(value), separators=(",", ":"))
        if isinstance(value, (list, tuple))
        else "null"
        if value is None
        else value
    )
    return shlex.quote(f"model.{name}={text}")
