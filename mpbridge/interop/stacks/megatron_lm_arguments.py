"""Megatron-LM's versions, and its command line as its parser reads it: options, their values and what is given. Nothing is executed.

Read at d98e8a64 (core 0.20.0), megatron/training/arguments.py.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from mpbridge.common.errors import cut, nearest
from mpbridge.common.files import shipped
from mpbridge.common.formats import dtype
from mpbridge.interop.stacks.meaning import Sharded
from mpbridge.interop.stacks.optimizers import Setting, Trained, settings
from mpbridge.interop.stacks.reading import MOST_SUGGESTED, Reader, state_word, stray
from mpbridge.precision.megatron_spec.versions import BEFORE_017, RELEASES, SINCE_017

NAME = "megatron-lm"
VERSIONS = dict(one.megatron_lm for one in RELEASES if one.megatron_lm)
"""Supported versions; the first belongs to the released megatron-core."""
CORE = {one.megatron_lm[0]: one.version for one in RELEASES if one.megatron_lm}
"""Version -> its megatron-core."""


@functools.cache
def options(version: str = [*VERSIONS][-1]) -> Mapping[str, Any]:
    """option -> how many values it takes (an int, '+' or '*'); scripts/evidence/stacks/megatron_lm.py writes the file from the parser."""
    data = shipped("interop/stacks/data/megatron_lm.json")
    older = data["older"].get(version, {"lacks": (), "has": {}})
    lacks = frozenset(older["lacks"])
    found = {name: arity for name, arity in data["options"].items() if name not in lacks} | older["has"]
    # --use-megatron-fsdp had this name before the supported versions
    return MappingProxyType({**found, "--use-custom-fsdp": 0})


@functools.cache
def choices(version: str) -> Mapping[str, str]:
    """option -> the values that its parser takes, of those that are read here and list theirs."""
    data = shipped("interop/stacks/data/megatron_lm.json")
    return MappingProxyType({**data["choices"], **data["older"].get(version, {}).get("choices", {})})


def takes(word: str, version: str) -> bool:
    """Whether its parser takes an option with that value: '--exp-avg-dtype fp8'."""
    option, _, value = word.partition(" ")
    return value in choices(version).get(option, value).split(" ")


MODULES_FILE = "--te-precision-config-file"
VALUES: Mapping[str, tuple[str, Any]] = MappingProxyType({
    # option -> (name, its default, whose type it takes), by subject
    "--loss-scale": ("loss_scale", None), "--initial-loss-scale": ("initial_loss_scale", 2.0**32), "--min-loss-scale": ("min_loss_scale", 1.0),
    "--loss-scale-window": ("loss_scale_window", 1000.0), "--hysteresis": ("hysteresis", 2),
    "--fp8-format": ("fp8", None), "--fp8-recipe": ("fp8_recipe", "delayed"), "--fp8-margin": ("fp8_margin", 0), "--fp8-interval": ("fp8_interval", 1),
    "--fp8-amax-history-len": ("fp8_amax_history_len", 1), "--fp8-amax-compute-algo": ("fp8_amax_compute_algo", "most_recent"),
    "--fp8-quantizer-factory": ("fp8_quantizer_factory", None), "--fp4-format": ("fp4", None), "--fp4-recipe": ("fp4_recipe", "nvfp4"),
    "--fp4-quantizer-factory": ("fp4_quantizer_factory", None),
    "--num-layers-at-start-in-bf16": ("first", 1), "--num-layers-at-end-in-bf16": ("last", 1), MODULES_FILE: ("modules_file", None),
    "--main-grads-dtype": ("main_grads", "fp32"), "--main-params-dtype": ("main_params", "fp32"), "--exp-avg-dtype": ("exp_avg", "fp32"),
    "--exp-avg-sq-dtype": ("exp_avg_sq", "fp32"),
    "--megatron-fsdp-main-params-dtype": ("fsdp_main_params", "fp32"), "--megatron-fsdp-main-grads-dtype": ("fsdp_main_grads", "auto"),
    "--megatron-fsdp-grad-comm-dtype": ("fsdp_grad_comm", "auto"), "--data-parallel-sharding-strategy": ("strategy", None),
    "--moe-router-dtype": ("router", None), "--output-logit-dtype": ("logits", None), "--transformer-impl": ("transformer_impl", "transformer_engine"),
    "--optimizer": ("optimizer", "adam"), "--optimizer-offload-fraction": ("offload_fraction", 1.0), "--yaml-cfg": ("yaml", None),
    "--hybrid-override-pattern": ("pattern", None), "--hybrid-layer-pattern": ("pattern", None),
})  # fmt: skip
SWITCHES: Mapping[str, str] = MappingProxyType({
    "--bf16": "bf16", "--fp16": "fp16", "--accumulate-allreduce-grads-in-fp32": "accumulate", "--grad-reduce-in-bf16": "reduce_bf16",
    "--no-fp8-wgrad": "no_wgrad", "--disable-fp8-wgrad": "no_wgrad", "--fp8-param-gather": "fp8_stored", "--fp4-param-gather": "fp4_stored",
    "--first-last-layers-bf16": "edges", "--reuse-grad-buf-for-mxfp8-param-ag": "reuse", "--fp8-output-proj": "fp8_output_proj",
    "--use-precision-aware-optimizer": "aware", "--use-distributed-optimizer": "distributed",
    "--optimizer-cpu-offload": "offload",
    "--use-megatron-fsdp": "megatron_fsdp", "--use-custom-fsdp": "megatron_fsdp", "--use-torch-fsdp2": "fsdp2",
    "--fp32-residual-connection": "residual", "--attention-softmax-in-fp32": "softmax", "--apply-query-key-layer-scaling": "scaled_by_layer",
    "--fp16-lm-cross-entropy": "fp16_loss", "--is-hybrid-model": "hybrid",
})  # fmt: skip
STRATEGIES: Mapping[str, Sharded] = {
    "no_shard": "nothing", "optim": "optimizer", "optim_grads": "gradients", "optim_grads_params": "everything",
}  # fmt: skip
"""Megatron-FSDP's --data-parallel-sharding-strategy -> what is divided."""


@dataclass
class Arguments:
    """A parsed command line, with the parser's defaults."""

    version: str
    values: dict[str, Any] = field(default_factory=lambda: dict(VALUES.values()))
    said: set[str] = field(default_factory=set)
    own: dict[str, Any] = field(default_factory=dict)
    """Settings of one optimizer or another that are given, by megatron-core's name."""
    other: list[str] = field(default_factory=list)
    read: Reader = field(default_factory=lambda: Reader({}))
    """What is to be said of it."""

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def on(self, *names: str) -> bool:
        """Whether one of the switches was given."""
        return any(name in self.said for name in names)

    @property
    def base(self) -> str:
        """The compute dtype."""
        return "bf16" if self.on("bf16") else "fp16" if self.on("fp16") else "fp32"

    @property
    def trained(self) -> Trained:
        """What trains the run."""
        name, core, there = self["optimizer"], CORE[self.version], own_settings(self.version)
        return Trained(name=name, core=core, distributed=self.on("distributed"), there=there, given=self.own)

    @property
    def dtypes(self) -> bool:
        """Whether Megatron-FSDP has its own dtype flags in that version."""
        return SINCE_017.holds(CORE[self.version])

    @property
    def never_fp4(self) -> bool:
        """Whether --fp4-format has no effect: a hybrid of a megatron-core whose stack does not open its context."""
        return BEFORE_017.holds(CORE[self.version]) and bool(self.on("hybrid") or self["pattern"])

    @property
    def strategy(self) -> str:
        """Megatron-FSDP's; its default divides everything since its flags for dtypes, nothing before."""
        return self["strategy"] or ("optim_grads_params" if self.dtypes else "no_shard")


_PARSERS = {"muon_momentum": 0.9}
"""Defaults of its parser that are not those of megatron-core's class (training/arguments.py, core_v0.16.1 and d98e8a64)."""
_PARSERS_WORDS = {"muon_fp32_matmul_prec": ("low", "medium", "high")}
"""Its choices where they are not what megatron-core understands: there is no "highest", and torch does not know "low"."""


@functools.cache
def own_settings(version: str) -> Mapping[str, Setting]:
    """Field -> setting of an optimizer of its own, in a Megatron-LM."""
    known, found = options(version), {}
    for name, one in settings(CORE[version]).items():
        ways = [f"--{word.replace('_', '-')}" for word in (name, name.replace("muon_", "muon_no_", 1))]
        option = next((one for one in ways if one in known), "")
        default, words = _PARSERS.get(name, one.default), _PARSERS_WORDS.get(name, one.words)
        found[name] = dataclasses.replace(one, default=default, option=option, words=words)
    return MappingProxyType(found)


def spelled(value: Any) -> str:
    """A value in its option's spelling: dtypes are fp32, bf16, fp16 and, for moments, fp8."""
    return state_word(dtype(str(value))) if str(value).startswith("torch.") else str(value)


def by_dest() -> Mapping[str, str]:
    """Attribute of args -> the option that sets it."""
    known = {option: option[2:].replace("-", "_") for option in (*VALUES, *SWITCHES)}
    special = {"--fp8-format": "fp8", "--fp4-format": "fp4", "--output-logit-dtype": "logit_dtype"}
    dropped = ("--disable-fp8-wgrad", "--no-fp8-wgrad", "--use-custom-fsdp")
    return {name: option for option, name in (known | special).items() if option not in dropped}


def parse(words: list[str], version: str) -> Arguments:
    """What a command line gives; values that cannot be read are faults of its reader."""
    given, known, unknown = Arguments(version), options(version), 0
    while words:
        word = words.pop(0)
        name, equals, attached = word.partition("=")
        if word.startswith("--") and name in known:
            values, arity = [attached] if equals else list[str](), known[name]
            most = 0 if equals else arity if isinstance(arity, int) else len(words)
            while words and not _OPTION.match(words[0]) and most > len(values):
                values.append(words.pop(0))
            _store(given, name, values)
        elif word.startswith("--") or (word.strip() and not word.endswith(".py")):
            given.read.note("unknown", _unknown(word, known if unknown < MOST_SUGGESTED else ()))
            unknown += 1
    return given


def _unknown(word: str, known: Iterable[str]) -> str:
    """The note about a word that is no option of the parser. known: those that may be meant."""
    name = word.partition("=")[0]
    if not word.startswith("--"):
        return stray(word, known)
    if " " in name:
        needed = f"{cut(name.split()[0])} and its value as separate words"
        return f"{cut(name)} (quoted as one word: its parser needs {needed})"
    near = nearest(name, known, most=1)
    return cut(name) + (f" (nearest: {near[0]})" if near else "")


_OPTION = re.compile(r"-[^\d.]")
"""What an option begins with, unlike a negative number."""


def _store(given: Arguments, option: str, values: list[str]) -> None:
    name, default = VALUES.get(option, (SWITCHES.get(option, ""), None))
    faults = given.read.faults
    own = next((one for one in own_settings(given.version).values() if one.option == option), None)
    switch = option in SWITCHES or (own is not None and isinstance(own.default, bool))
    if own is not None:
        name, default = own.name, own.default
    if not name:
        given.other.append(option)
        return
    if switch:
        given.own |= {} if own is None else {own.name: not own.default}
        faults += [f"{option}={cut(values[0])}: it takes no value"] if values else []
    elif not values or values[0] == "":
        faults.append(f"{option} has no value: pass the script's variables with --env NAME=VALUE")
        return
    else:
        convert = float if name == "loss_scale" else str if default is None else type(default)
        try:
            (given.values if own is None else given.own)[name] = convert(values[0])
        except ValueError:
            faults.append(f"{option} {cut(values[0])}: expected a {'whole ' if convert is int else ''}number")
        if not takes(f"{option} {values[0]}", given.version):
            faults.append(f"{option} {cut(values[0])}: expected {choices(given.version)[option].replace(' ', ', ')}")
    given.said.add(name)
