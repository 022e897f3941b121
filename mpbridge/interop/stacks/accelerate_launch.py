"""The options of `accelerate launch`, as the settings of its configuration file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from mpbridge.common.errors import cut
from mpbridge.interop.stacks.known_keys import known
from mpbridge.interop.stacks.reading import options_of

_TYPES: Mapping[str, str] = {
    "use_fsdp": "FSDP", "use_deepspeed": "DEEPSPEED", "use_megatron_lm": "MEGATRON_LM", "multi_gpu": "MULTI_GPU",
}  # fmt: skip
"""Option -> distributed_type, in the order in which the launcher asks for them."""
_SECTIONS = ("fsdp_config", "deepspeed_config", "megatron_lm_config")


def launch_options(program: Sequence[str], words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The launcher's own options in a command, and notes on the arguments of the script that it starts."""
    names = [PurePath(word).name for word in program]
    at = next((at for at, name in enumerate(names) if name in ("launch", "accelerate.commands.launch")), -1)
    own = [word.partition("=")[0] for word in words if word.startswith("--")]
    shown = ", ".join(cut(name) for name in own[:6]) + (", ..." if len(own) > 6 else "")
    notes = [f"{names[-1]} has options of its own, which are not read: {shown}"] if own else []
    return [word for word in program[at + 1 : -1] if word not in ("-m", "--module")], notes


def as_file(words: Iterable[str], name: str) -> tuple[dict[str, Any], list[str], list[str]]:
    """(the configuration that the options amount to, stray words, what is assumed). name: the stack's, for its known keys."""
    given, strays = options_of(words)
    keys, assumed = known(name), list[str]()
    made: dict[str, Any] = {}
    for option, value in given.items():
        section = next((one for one in _SECTIONS if option in keys[one]), None)
        if option in _TYPES:
            if str(value).lower() != "false":
                made.setdefault("distributed_type", _TYPES[option])
        elif option == "config_file":
            assumed.append(f"--config_file {cut(value)} decides what is not said here, but is not read: pass that file")
        elif section is not None:
            made.setdefault(section, {})[option] = value
        elif option.startswith("dynamo_"):
            made.setdefault("dynamo_config", {})[option] = value
        elif option.startswith("fp8_"):
            key = option if option == "fp8_format" else option.removeprefix("fp8_")
            made.setdefault("fp8_config", {})[key] = _truths(value) if key == "override_linear_precision" else value
        else:
            made["use_cpu" if option == "cpu" else option] = value
    return made, strays, assumed


def _truths(value: Any) -> Any:
    """'false,false,true' as a list."""
    return (
        [word.strip().lower() in ("true", "1", "yes") for word in value.split(",")] if isinstance(value, str) else value
    )
