"""Converts a checkpoint's weights to a folder in Hugging Face's layout: parameters are split one by one and written in files of a few gigabytes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mpbridge.common.errors import BadValue, CheckpointError, MpbridgeError, Refused
from mpbridge.common.files import ProgressCallback, folder_inside, read_json
from mpbridge.settings.huggingface import folder as layout
from mpbridge.settings.huggingface.section import family_of
from mpbridge.settings.huggingface.tensors import ADAPTERS, Mapped
from mpbridge.settings.huggingface.written import config_json, refuse_differences
from mpbridge.training.checkpoint import store
from mpbridge.training.checkpoint.continuation import SOURCE
from mpbridge.training.checkpoint.reader import Contents
from mpbridge.training.checkpoint.store import CONFIG
from mpbridge.training.weights.adapters import write_alone
from mpbridge.training.weights.export import Export, Given, Merging

if TYPE_CHECKING:
    from mpbridge.settings.container import Run
    from mpbridge.training.serving.cast import Served


NewCasting = Callable[[Path, "Run", Sequence[Mapped]], "Served"]
"""(the checkpoint, its run, the parameters) -> how to quantize them. Raises BadValue for weights that the format cannot hold."""
Adapters = Literal["alone"] | Callable[[Path, Export], AbstractContextManager[Merging]]
"""What becomes of adapters: a folder of their own, or (the checkpoint, its export) -> how they are added to the base."""


def checkpoint_run(path: Path) -> Run:
    """The run that saved a sealed checkpoint, from its configuration. Raises CheckpointError."""
    from mpbridge.settings.container import ConfigContainer

    file = path / CONFIG
    if not file.is_file():
        raise CheckpointError(f"{file} is missing: without it the tensors' model is unknown")
    container = ConfigContainer.load(file, check=False)
    return container.resolved(container.smallest_world(), training=False)


def to_folder(
    path: Path,
    target: Path,
    *,
    like: Path | None = None,
    dtype: str | None = None,
    casting: NewCasting | None = None,
    adapters: Adapters | None = None,
    told: ProgressCallback = lambda done, total: None,
) -> Given:
    """Writes the weights of the checkpoint in `path` to the new folder `target`.

    like: a folder whose config.json, tokenizer and vocabulary size the new one gets. dtype: torch's name, instead of the stored dtype;
    'float32' uses the main weights, if there are any. casting: quantizes weights, which `dtype` then does not concern.
    adapters: of a checkpoint that has some: "alone", then `like` names the base, or how to merge them. Raises CheckpointError, BadValue, and Contradiction for a model that the layout cannot describe.
    """
    with opened(path, like=like, dtype=dtype, adapters=adapters) as export:
        export.casting = None if casting is None else casting(path, export.run, export.wanted)
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise BadValue(f"{target} already exists: expected a new folder")
        partial = folder_inside(target.parent, f".{target.name}.partial")
        try:
            partial.mkdir(parents=True, exist_ok=True)
            given = (
                write_alone(export, partial, like, told, Given(path=target, family=export.family.name))
                if adapters == "alone"
                else export.write(partial, like, told)
            )
            if target.exists():
                target.rmdir()
            partial.rename(target)
        except MpbridgeError:
            with suppress(OSError):
                partial.rmdir()  # empty: refused before anything was written
            raise
        except (OSError, KeyboardInterrupt) as error:
            complete = list(partial.glob("[!.]*.safetensors"))
            said = f"{len(complete)} of its files are complete in {partial}, and the same command goes on from there"
            if not complete:
                said = "nothing of it is kept"
                shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, KeyboardInterrupt):
                raise KeyboardInterrupt(f"interrupted: {target} is not written; {said}") from None
            raise BadValue(f"{target} cannot be written: {error.strerror or error} ({said})") from error
    given.path = target
    return given


@contextmanager
def opened(
    path: Path, *, like: Path | None = None, dtype: str | None = None, adapters: Adapters | None = None
) -> Iterator[Export]:
    """The weights of the checkpoint in `path`, read parameter by parameter. like, dtype, adapters: as for `to_folder`, and it raises the same."""
    store.check(path)
    run = checkpoint_run(path)
    _agrees(run, adapters)
    origin = _origin(path)
    model = dict(run.facts.model) | {name: run.inputs["model"][name] for name in ("vocab_size", "max_sequence_length")}
    with Contents(path) as contents, ExitStack() as stack:
        export = Export(contents, run, _config(model, origin, like, contents, run), origin, dtype)
        if callable(adapters):
            export.merge = stack.enter_context(adapters(path, export))
        yield export


def _agrees(run: Run, adapters: Adapters | None) -> None:
    rank = run.facts.shape.lora_rank
    if rank and adapters is None:
        raise Refused(
            f"the checkpoint has adapters of rank {rank}, which no tensor of the model's folder holds: --adapters {', '.join(ADAPTERS[:-1])} or {ADAPTERS[-1]}"
        )
    if adapters and not rank:
        raise BadValue("--adapters: the checkpoint has none (model.lora_rank is not set)")


def _origin(path: Path) -> dict[str, Any]:
    """The description of the folder that the checkpoint was made from; {} for a checkpoint of a run."""
    file = path / SOURCE
    found = read_json(file) if file.is_file() else {}
    if not isinstance(found, dict) or (found and not isinstance(found.get("config"), dict)):
        raise CheckpointError(f"{file}: expected the content that mpbridge convert wrote")
    return found


def _config(
    model: Mapping[str, Any], origin: Mapping[str, Any], like: Path | None, contents: Contents, run: Run
) -> dict[str, Any]:
    if like is not None:
        config = layout.read_config(like)
        family_of(config, str(like / layout.CONFIG))
        refuse_differences(model, config)
        return config
    if origin:
        return dict(origin["config"])
    stored = contents.index.tensors.get("embedding.word_embeddings.weight")
    return config_json(model, rows=run.facts.shape.vocab_size, dtype=stored.dtype if stored else "bfloat16")
