"""Checkpoint fingerprints and the verdict on resuming: compared before anything is loaded, without a framework."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mpbridge.common.errors import CheckpointError, MpbridgeError
from mpbridge.common.facts import ADAMS, OptimizerFacts, RunFacts
from mpbridge.common.formats import DType, plain
from mpbridge.common.traits import known, traits
from mpbridge.planning.memory.keeps import Holding, keeps, updater
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.settings.sections import YARN
from mpbridge.training.checkpoint.format import read_file

SCHEMA = 1
FILE = "precision.json"
"""The fingerprint's file inside a checkpoint."""

ResumeKind = Literal["same", "safe", "lossy", "weights only", "refused"]
_OPTIMIZER_FIELDS = (
    "use_precision_aware_optimizer", "store_param_remainders", "main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype",
)  # fmt: skip

_KEEPS: Mapping[DType, frozenset[DType]] = {
    # dtypes that can represent every value of the key's dtype. FP16 and 8-bit states have an FP32 scale, so their values need 24 mantissa bits
    DType.FP64: frozenset({DType.FP64}),
    DType.FP32: frozenset({DType.FP32, DType.FP64}),
    DType.BF16: frozenset({DType.BF16, DType.FP32, DType.FP64}),
    DType.FP16: frozenset({DType.FP16, DType.FP32, DType.FP64}),
    DType.UINT8: frozenset({DType.UINT8, DType.FP32, DType.FP64}),
}


_STATES = ("optimizer states and their step count",)
_TABLES = ("parallel", "shape", "versions", "optimizer_section", "function", "stored")
"""Fields of a fingerprint that are mappings."""
_UPDATES = ("adam_beta1", "adam_beta2", "adam_eps", "clip_grad", "decoupled_lr", "decoupled_min_lr")
"""Settings of the optimizer section, read by several optimizers, that change what an update is and that no schedule has."""
_FUNCTION = (
    "hidden_dropout", "attention_dropout", "normalization", "layernorm_epsilon", "layernorm_zero_centered_gamma", "activation_func", "rotary_base", "rotary_percent", "rotary_interleaved",
    "rope_scaling", "rope_scaling_factor", "seq_len_interpolation_factor", "position_embedding_type", *YARN, "softmax_scale", "window_size", "apply_residual_connection_post_layernorm", "moe_router_score_function", "lora_alpha",
)  # fmt: skip
"""Settings of the model that change what it computes from the same tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """A checkpoint's precision: enough to decide, without reading a tensor, whether and how another run can resume from it."""

    recipe: str
    policy: PrecisionPolicy
    """Resolved completely: no optimizer fact is left open."""
    engine: str
    realization: str
    optimizer: str
    distributed: bool
    parallel: Mapping[str, Any]
    shape: Mapping[str, Any]
    versions: Mapping[str, Any]
    optimizer_section: Mapping[str, Any]
    """The optimizer section's settings for states, to resolve another recipe as this run would have, and what else decides an update, the global batch included."""
    random: bool
    """Whether dropout is on or rounding is stochastic, so that the random states matter for resuming."""
    function: Mapping[str, Any] = field(default_factory=dict)
    """Settings that change what the model computes from its tensors (_FUNCTION)."""
    stored: Mapping[str, str] = field(default_factory=dict)
    """Role -> dtype of the tensors in the files ('main_params' and moments are stored unscaled)."""

    def as_data(self) -> dict[str, Any]:
        """The fingerprint as JSON types, with a schema number."""
        data = {"schema": SCHEMA} | {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return data | {"policy": self.policy.as_data(), "layout": self.layout(), "sha256": self.policy.fingerprint()}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Fingerprint:
        """The fingerprint from `as_data`'s data. Raises CheckpointError for another schema or missing facts."""
        if not isinstance(data, Mapping) or data.get("schema") != SCHEMA:
            found = data.get("schema") if isinstance(data, Mapping) else type(data).__name__
            raise CheckpointError(f"fingerprint of schema {found!r}: this mpbridge reads schema {SCHEMA}")
        try:
            facts = {f.name: data[f.name] for f in dataclasses.fields(cls) if f.name != "function"}
            facts["function"] = data.get("function") or {}
            if shapeless := [name for name in _TABLES if not isinstance(facts[name], Mapping)]:
                raise TypeError(f"{', '.join(shapeless)}: expected a table")
            if "mamba" in facts["shape"]:  # how checkpoints of November 2026 call the sizes of a hybrid's parts
                shape = dict(facts["shape"])
                facts["shape"] = {"sizes": shape.pop("mamba") or {}, **shape}
            return cls(**(facts | {"policy": PrecisionPolicy.from_data(data["policy"])}))
        except (KeyError, TypeError, AttributeError, MpbridgeError) as error:
            raise CheckpointError(f"the fingerprint cannot be read: {type(error).__name__}: {error}") from error

    @property
    def family(self) -> str:
        """The optimizer, or what stands for all with the same states."""
        return "adam" if self.optimizer in ADAMS else self.optimizer

    def kept(self) -> Mapping[str, Holding]:
        """What such a run keeps of a parameter (`memory.keeps`). Raises UnknownName for an engine that is not installed here."""
        # 16-bit parameters that are their own main copy train only without the distributed optimizer (rule full-16-bit-with-distributed-optimizer)
        alone = self.policy.narrow_alone
        optimizer = OptimizerFacts(name=self.optimizer, distributed=self.distributed and not alone)
        return keeps(self.policy, traits(self.engine), optimizer)

    def layout(self) -> dict[str, Any]:
        """A readable summary of what shapes a checkpoint: role -> dtype, owner and sharding, and the regions stored in low formats."""
        roles = {
            role: {"dtype": held.dtype.short, "owner": held.owner, "sharding": held.sharding}
            for role, held in self.kept().items()
            if held.view_of is None
        }
        regions = self.policy.as_data()["regions"]
        stored = [region for region in regions if region["quant"] and region["quant"]["stored"]]
        return {"roles": roles, "stored_formats": stored}

    def with_policy(self, policy: PrecisionPolicy, recipe: str, engine: str | None = None) -> Fingerprint:
        """The same run with another recipe (and engine): `policy` resolved with this run's optimizer section."""
        settled, engine = policy.settled(self.optimizer_section), engine or self.engine
        made = dataclasses.replace(self, policy=settled, recipe=recipe, engine=engine)
        optimizer, random = updater(self.family, settled, traits(engine)), self.random or _stochastic(settled)
        return dataclasses.replace(made, optimizer=optimizer, random=random)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether and how a run resumes from a checkpoint."""

    kind: ResumeKind
    lost: tuple[str, ...] = ()
    """What the checkpoint has but the run cannot restore."""
    notes: tuple[str, ...] = ()
    """Differences that lose nothing."""
    why: tuple[str, ...] = ()
    """Reasons of 'weights only' and 'refused', each with its cure."""
    second_moment: float | None = field(default=None, compare=False)
    """Mean second moment of the states that were loaded, as their run saved it; None where none were, or it is not known."""

    @property
    def goes_on(self) -> bool:
        """Whether optimizer states are restored."""
        return self.kind in ("same", "safe", "lossy")

    @property
    def short(self) -> str:
        """The kind and what is lost, in a line."""
        return f"{self.kind}{self.loss}"

    @property
    def loss(self) -> str:
        """' (lost: ...)'; '' if nothing is."""
        return f" (lost: {'; '.join(self.lost)})" if self.lost else ""

    def without_states(self, why: str) -> Verdict:
        """The same verdict with only the weights, for the reason `why`."""
        return dataclasses.replace(self, kind="weights only", lost=_STATES, why=(why,))

    def lines(self) -> list[str]:
        """The verdict as text; the first line is the kind."""
        groups = (("lost", self.lost), ("because", self.why), ("note", self.notes))
        return [self.kind, *(f"  {name}: {text}" for name, texts in groups for text in texts)]


def fingerprint(
    recipe: str,
    policy: PrecisionPolicy,
    facts: RunFacts,
    optimizer: Mapping[str, Any],
    stored: Mapping[str, str] | None = None,
) -> Fingerprint:
    """The fingerprint of a run. optimizer: the optimizer's section as its author wrote it; stored: role -> dtype of the checkpoint's tensors."""
    settled = policy.settled(optimizer)
    dropout = any(float(facts.model.get(name, 0.1) or 0.0) > 0 for name in ("hidden_dropout", "attention_dropout"))
    settings = facts.optimizer.settings
    section = {
        name: plain(optimizer[name])
        for name in (*_OPTIMIZER_FIELDS, "global_batch_size")
        if optimizer.get(name) is not None
    }
    return Fingerprint(
        recipe=recipe,
        policy=settled,
        engine=facts.engine,
        realization=facts.realization,
        optimizer=facts.optimizer.name,
        distributed=facts.optimizer.distributed,
        parallel=dataclasses.asdict(facts.parallel),
        shape=plain(dataclasses.asdict(facts.shape)),
        versions=dataclasses.asdict(facts.versions),
        optimizer_section=section
        | plain({name: settings[name] for name in _UPDATES if name in settings} | facts.optimizer.own),
        random=dropout or _stochastic(settled),
        function={name: _plain_or_text(facts.model[name]) for name in _FUNCTION if name in facts.model},
        stored=dict(stored or {}),
    )


def read_fingerprint(folder: Path) -> Fingerprint:
    """The fingerprint in a checkpoint's folder. Raises CheckpointError naming the file."""
    return read_file(folder / FILE, Fingerprint.from_data)


def verdict(saved: Fingerprint, wanted: Fingerprint) -> Verdict:
    """The verdict on resuming `saved` as `wanted`."""
    refusals = _other_model(saved, wanted) + _other_names(saved, wanted)
    if refusals:
        return Verdict(kind="refused", why=tuple(refusals))
    notes = _notes(saved, wanted)
    reasons = _unusable_states(saved, wanted)
    if reasons:
        return Verdict(kind="weights only", why=tuple(reasons), lost=_STATES, notes=tuple(notes))
    lost = _lost(saved, wanted)
    if lost:
        return Verdict(kind="lossy", lost=tuple(lost), notes=tuple(notes))
    return Verdict(kind="safe" if notes else "same", notes=tuple(notes))


def _other_model(saved: Fingerprint, wanted: Fingerprint) -> list[str]:
    ignored = {"seq_length"} if not wanted.shape.get("learned_positions") else set()
    ignored |= {"lora_rank", "lora_targets"} if not saved.shape.get("lora_rank") else set()
    names = [name for name in saved.shape if name not in ignored and saved.shape[name] != wanted.shape.get(name)]
    return [
        f"another model: {name} is {saved.shape[name]} in the checkpoint and {wanted.shape.get(name)} in the run"
        for name in sorted(names)
    ]


def _other_names(saved: Fingerprint, wanted: Fingerprint) -> list[str]:
    forms = [None if (found := known(one.engine)) is None else found.checkpoints for one in (saved, wanted)]
    if None in forms:
        name = (saved, wanted)[forms.index(None)].engine
        return [f"engine {name} is not installed here, so nothing is known about its checkpoints: install its package"]
    if forms[0] == forms[1]:
        return []
    return [
        f"engine {saved.engine} stores weights under different names and shapes than {wanted.engine}: keep engine={saved.engine}"
    ]


def _unusable_states(saved: Fingerprint, wanted: Fingerprint) -> list[str]:
    had, gets = (" ".join(one.policy.frozen) or "nothing" for one in (saved, wanted))
    reset = "resume with only the weights (--reset-optimizer)"
    if wanted.shape.get("lora_rank") and not saved.shape.get("lora_rank"):
        return [f"the checkpoint has no adapters, which begin as they are initialised: {reset}"]
    if had != gets:
        return [f"other parameters are trained: {had} was frozen in the checkpoint, {gets} in the run: {reset}"]
    if saved.family == wanted.family:
        return []
    keep = f"keep optimizer.optimizer={saved.optimizer}"
    return [f"{wanted.optimizer} cannot use the states of {saved.optimizer}: {keep}, or {reset}"]


def _lost(saved: Fingerprint, wanted: Fingerprint) -> list[str]:
    a, b = saved.policy, wanted.policy
    had_all, gets_all = saved.kept(), wanted.kept()
    lost = []
    had, gets = _weights(had_all), _weights(gets_all)
    if gets not in _KEEPS[had]:
        halves = "main_params" in had_all and had_all["main_params"].dtype is DType.INT16
        what = "the 16 remainder bits of the main weights" if halves else "bits of the main weights"
        lost.append(f"{what}: {had.short} -> {gets.short}")
    for name, text in (("exp_avg", "first moments"), ("exp_avg_sq", "second moments")):
        # SGD and Muon have no second moment; what Adam keeps beside Muon is wide (rules muon-cannot, torch-muon-keeps-no-main-weights)
        if name in had_all and name in gets_all and gets_all[name].dtype not in _KEEPS[had_all[name].dtype]:
            lost.append(f"bits of the {text}: {had_all[name].dtype.short} -> {gets_all[name].dtype.short}")
    had_steps, gets_steps = _history(a), _history(b)
    if had_steps and (gets_steps != had_steps or saved.realization != wanted.realization):
        lost.append(f"amax history of delayed scaling ({had_steps} steps)")
    if _dynamic(a) and not _dynamic(b):
        lost.append("the dynamic loss scale and its counters")
    if saved.parallel != wanted.parallel and wanted.random:
        lost.append("random states: the run has a different parallel layout")
    return lost


def _notes(saved: Fingerprint, wanted: Fingerprint) -> list[str]:
    notes = _policy_notes(saved, wanted)
    for name in ("engine", "optimizer", "realization", "distributed"):
        if getattr(saved, name) != getattr(wanted, name):
            notes.append(f"{name}: {getattr(saved, name)} -> {getattr(wanted, name)}")
    for name in ("parallel", "versions"):
        had, gets = getattr(saved, name), getattr(wanted, name)
        if changed := sorted(_changed(had, gets)):
            notes.append(f"{name}: " + ", ".join(f"{key} {had[key]} -> {gets.get(key)}" for key in changed))
    for name in _changed(saved.function, wanted.function):
        if name in wanted.function:
            gets = wanted.function[name]
            notes.append(f"the same weights in another model: {name} {saved.function[name]} -> {gets}")
    if saved.family == wanted.family:
        had, gets = (one.optimizer_section for one in (saved, wanted))
        others = [name for name in _changed(had, gets) if name not in _OPTIMIZER_FIELDS]
        notes += [f"other updates: {name} {had[name]} -> {gets.get(name)}" for name in others]
    before, now = (one.shape.get("seq_length") for one in (saved, wanted))
    return notes + ([f"sequence length {before} -> {now}"] if before != now else [])


def learned(saved: Fingerprint, wanted: Fingerprint) -> list[str]:
    """How `wanted` changes what is learned from where `saved` left off, as sentences: empty if both compute and keep the same."""
    changed = _changed(_facts(saved.policy), _facts(wanted.policy))
    if not changed:
        return []
    skips = wanted.policy.loss_scale.skips() if _dynamic(wanted.policy) and wanted.policy.loss_scale is not None else 0
    found = [f"{', '.join(changed)} differ", *(f"lost: {text}" for text in _lost(saved, wanted))]
    waits = [f"up to {skips} steps are skipped until the loss scale fits"]
    return found + (waits if skips and not _dynamic(saved.policy) else [])


def _policy_notes(saved: Fingerprint, wanted: Fingerprint) -> list[str]:
    a, b = saved.policy, wanted.policy
    notes = []
    changed = _changed(_facts(a), _facts(b))
    if changed:
        notes.append(f"recipe {saved.recipe} -> {wanted.recipe}: {', '.join(changed)} differ")
    if _history(b) and _history(a) != _history(b):
        notes.append("the amax history of delayed scaling starts empty")
    if b.loss_scale is not None and _dynamic(b) and not _dynamic(a):
        skips = f"up to {b.loss_scale.skips()} steps are skipped until it fits"
        notes.append(f"the loss scale starts at {b.loss_scale.initial:g}: {skips}")
    return notes


def _changed(had: Mapping[str, Any], gets: Mapping[str, Any]) -> list[str]:
    return [name for name in had if had[name] != gets.get(name)]


def _facts(policy: PrecisionPolicy) -> dict[str, Any]:
    return {name: value for name, value in policy.as_data().items() if name != "schema"}


def _weights(kept: Mapping[str, Holding]) -> DType:
    """dtype in which weights persist between steps: remainders and their parameters together are FP32."""
    dtype = kept.get("main_params", kept["params"]).dtype
    return DType.FP32 if dtype is DType.INT16 else dtype


def _history(policy: PrecisionPolicy) -> int:
    return max((quant.amax_history for quant in policy.quants if quant.row.history), default=0)


def _dynamic(policy: PrecisionPolicy) -> bool:
    return policy.loss_scale is not None and policy.loss_scale.dynamic


def _stochastic(policy: PrecisionPolicy) -> bool:
    # NVFP4 rounds gradients stochastically (arXiv 2509.25149, section 4)
    return any(quant.row.has("stochastic_rounding") for quant in policy.quants)


def _plain_or_text(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
