"""What the predicted bytes and times of a run leave out: one table, with the sign of each error. `memory` and `estimate` print it; `Memory.exact` uses it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mpbridge.common.facts import MUONS, RunFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Limitation:
    """One feature of a run that is counted as something else, or not at all."""

    asked: Callable[[RunFacts], bool]
    what: str
    instead: str
    """How it is counted."""
    time: str = ""
    """The real step compared with the predicted one; empty: no error."""
    memory: str = ""
    """The real bytes compared with the predicted ones; empty: no error."""
    states: bool = False
    """Whether parameters or optimizer states are affected."""


def hybrid(model: Mapping[str, Any]) -> bool:
    """Whether a model section describes a hybrid with Mamba layers."""
    return bool(model.get("hybrid_override_pattern") or model.get("is_hybrid_model"))


def _linear_attention(run: RunFacts) -> bool:
    return bool(run.model.get("linear_attention_freq") or run.model.get("experimental_attention_variant"))


def _packed(run: RunFacts) -> bool:
    names = ("variable_seq_lengths", "hybrid_context_parallel", "max_seqlen_per_dp_cp_rank")
    return any(bool(run.model.get(name)) for name in names)


def _no_network(run: RunFacts) -> bool:
    machine = run.machine
    return machine is not None and run.parallel.world_size > machine.domain and not machine.network


LIMITATIONS = (
    Limitation(asked=lambda run: hybrid(run.model) and not run.shape.pattern, what="state-space layers (Mamba)",
               instead="counted as layers of attention and an MLP, which are larger", time="faster", memory="smaller", states=True),
    Limitation(asked=lambda run: bool(run.shape.pattern), what="the scans of Mamba layers",
               instead="counted as the memory traffic of their operands, without the products inside", time="slower"),
    Limitation(asked=lambda run: bool(run.model.get("heterogeneous_block_specs")), what="layers of several shapes",
               instead="counted as layers of the configured shape, which no layer needs to exceed", time="faster", memory="smaller", states=True),
    Limitation(asked=_linear_attention, what="linear attention",
               instead="counted as softmax attention, without its gates and convolutions", time="faster", memory="larger by those weights", states=True),
    Limitation(asked=_packed, what="packed sequences or sequences of several lengths",
               instead="counted as whole sequences of seq_length", time="faster", memory="at most as large"),
    Limitation(asked=lambda run: run.optimizer.cpu_offload, what="the optimizer's states and update on the host",
               instead="counted as on the GPU", time="slower", memory="smaller", states=True),
    Limitation(asked=lambda run: run.optimizer.name in (*MUONS, "soap"), what="the products of Muon's and SOAP's steps",
               instead="not counted, nor the matrices in them", time="slower",
               memory="larger by a few copies of the largest matrix while the optimizer steps"),
    Limitation(asked=lambda run: run.realization == "emulated" and run.machine is not None and run.machine.gpu, what="emulation (emulate: true)",
               instead="weights and operands counted as it keeps them, in high precision (emulate=false counts the GPU's own)",
               memory="smaller natively, where they are stored in low precision"),
    Limitation(asked=_no_network, what="traffic between hosts", instead="", time="slower"),
)  # fmt: skip


def left_out_of_time(run: RunFacts) -> tuple[str, ...]:
    """What a predicted step leaves out, as text, each with the sign of its error."""
    return tuple(
        f"{_words(one, run)}; the real step is {one.time}" for one in LIMITATIONS if one.time and one.asked(run)
    )


def left_out_of_memory(run: RunFacts) -> tuple[str, ...]:
    """What predicted bytes leave out, as text, each with the sign of its error."""
    return tuple(
        f"{_words(one, run)}; the real bytes are {one.memory}" for one in LIMITATIONS if one.memory and one.asked(run)
    )


def states_counted(run: RunFacts) -> bool:
    """Whether all parameters and optimizer states are counted as they are."""
    return not any(one.states and one.asked(run) for one in LIMITATIONS)


def _words(one: Limitation, run: RunFacts) -> str:
    if one.asked is _no_network:
        return f"{one.what}: {run.machine.name} has no network in the table (a --machine-file can specify it)"
    return f"{one.what}: {one.instead}"
