"""The hook that measures every `logger.precision_every` steps, and again right after a step that looks wrong; the worst values over all ranks; unusual tokens."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mpbridge.backend.devices.collectives import from_all, largest, rank
from mpbridge.common.errors import BadValue
from mpbridge.common.files import opened_to_write
from mpbridge.common.report.console import warn
from mpbridge.common.report.metrics import record
from mpbridge.numerics.observation.modules import linears
from mpbridge.numerics.operands import Operand, Side
from mpbridge.numerics.statistics import Statistics, spread
from mpbridge.observe.telemetry.native import Tap
from mpbridge.observe.telemetry.probe import SAMPLE, Noise, Probe, Windows, weight_rows
from mpbridge.observe.telemetry.records import FILE, OPERANDS, SMALLEST, TABLES, WORDS, headlines, kept, line
from mpbridge.precision.regions import Gemm

ELEMENTS = 1 << 14
"""Elements of an operand that a measured step examines, in whole rows: a quarter of a rehearsal's, since training waits for it."""
PATIENCE = 10
"""Minimum number of steps between two unscheduled measurements, so that a run that goes wrong at every step is not measured at every step."""
UNLIKE = 100
"""Maximum number of events about tokens that a run writes."""
RECENT = 20
"""Number of earlier steps with which a loss, a gradient norm or the tokens are compared."""


class StatisticsHook:
    """A hook of `mpbridge.training`'s loop. every: steps between two measurements; 0: none. It does not change a bit of training.

    A measured step takes at most as long as two. Raises BadValue for a negative `every`. All ranks measure the same steps; rank 0 writes.
    """

    def __init__(self, folder: Path | str | None, *, every: int | None) -> None:
        self.every = 100 if every is None else every
        if self.every < 0:
            raise BadValue(f"logger.precision_every={every}: expected a number of steps, 0 for none")
        self.folder = None if folder is None else Path(folder)
        self.on = self.folder is not None and self.every > 0
        self._alarm, self._last_alarm = "", -PATIENCE
        self._recent: dict[str, deque[float]] = {name: deque(maxlen=RECENT) for name in ("loss", "grad_norm")}
        self._look: _Look | None = None
        self._begun = self._gone = False
        self._tokens, self._unlike = Tokens(), 0

    # --- moments -------------------------------------------------------------------------------------------------------------------------
    def built(self, training: Any) -> None:
        """Detaches from an engine that a schedule has replaced."""
        self._let_go()
        if self.on and rank() == 0:
            self._tokens.attach(training.engine.model)

    def started(self, training: Any) -> None:
        """On a resume, drops the lines of steps that will be repeated."""
        if self.on and not self._begun and rank() == 0:
            assert self.folder is not None
            self.folder.mkdir(parents=True, exist_ok=True)
            lines = kept(self.folder / FILE, int(training.counters.iteration))
            with opened_to_write(self.folder / FILE) as stream:
                stream.writelines(lines)
        self._begun = True

    def stepping(self, training: Any) -> None:
        """Starts measuring if the next step is due."""
        step = int(training.counters.iteration) + 1
        self._tokens.on = True
        if not self.on or (step % self.every and not self._alarm):
            return
        self._look = _Look(training.engine, self._alarm or f"every {self.every} steps")
        self._alarm = ""
        self._look.start()

    def stepped(self, training: Any, result: Any) -> None:
        """Collects and writes the measurement of this step, if any; requests another one if the step looks wrong."""
        step = int(training.counters.iteration)
        look, self._look = self._look, None
        nats = self._data(training)
        if look is not None:
            began = time.perf_counter()
            tables, notes = look.stop()
            tables = worst_of_all(tables)
            training.measured |= headlines(tables)
            seconds = round(time.perf_counter() - began + look.seconds, 6)
            facts = {"iteration": step, "realization": look.realization, "recipe": training.run.recipe, "why": look.why}
            facts |= {"seconds": seconds} | ({} if nats is None else {"nats_per_token": round(nats, 4)})
            facts |= {"notes": notes} if notes else {}
            self._write(line(facts, tables), look.windows)
        self._judge(step, result)

    def evaluating(self, *ignored: Any) -> None:
        """Does nothing."""

    evaluated = finished = evaluating

    def closed(self) -> None:
        """Removes every hook."""
        self._let_go()
        self._tokens.close()

    # --- parts ---------------------------------------------------------------------------------------------------------------------------
    def _data(self, training: Any) -> float | None:
        """Nats per token of rank 0's samples. Tokens unlike the earlier ones are recorded as an event, at most UNLIKE times."""
        self._tokens.on = False
        nats, usual = self._tokens.step() or (None, None)
        if usual is not None and self._unlike < UNLIKE:
            self._unlike += 1
            text = f"the tokens of step {training.counters.iteration} are unlike those before: {nats:.3g} nats a token by how often each was seen, usual {usual:.3g}"
            record(training, "tokens", text, say=False, nats=nats, usual=usual)
        return nats

    def _judge(self, step: int, result: Any) -> None:
        """Every rank has the same result, so all ranks decide alike."""
        why = ""
        for name, value in (("loss", result.loss), ("grad_norm", result.grad_norm)):
            before = sorted(self._recent[name])
            if value is not None and not math.isfinite(value):
                why = f"{name} of step {step} not finite"
            elif value is not None and len(before) >= 5:
                usual = before[len(before) // 2]
                limit = usual * (1.3 if name == "loss" else 5.0)
                why = f"{name} of step {step} {value:.4g}, usual {usual:.4g}" if value > limit else why
            if value is not None and math.isfinite(value):
                self._recent[name].append(value)
        if why and self.on and step - self._last_alarm >= PATIENCE:
            self._alarm, self._last_alarm = why, step

    def _write(self, text: str, windows: Windows) -> None:
        if rank() != 0 or self.folder is None or self._gone:
            return
        try:
            with opened_to_write(self.folder / FILE, append=True) as stream:
                stream.write(text)
            windows.write(self.folder)
        except OSError as error:
            self._gone = True
            what = f"{self.folder / FILE} cannot be written ({error.strerror or error})"
            warn(f"{what}; the run continues without statistics")

    def _let_go(self) -> None:
        if self._look is not None:
            self._look.stop()
            self._look = None


class _Look:
    """The measurement of one step of one engine."""

    def __init__(self, engine: Any, why: str) -> None:
        self.engine, self.why, self.seconds = engine, why, 0.0
        self.noise, self.probe = Noise(), Probe()
        self.windows = Windows(list(linears(engine.model)))
        self.probe.sources.append(self.windows.see)
        self.statistics: Statistics | None = None
        emulation = getattr(engine, "emulation", None)
        self._emulation = emulation if hasattr(emulation, "observer") else None
        policy, layers = engine.run.policy, engine.run.facts.shape.num_layers
        native = policy.quantized and self._emulation is None
        self.tap = Tap(self.probe, self.noise, lambda path: policy.of_path(path, layers)) if native else None
        self.realization = "emulated" if self._emulation is not None else "native" if native else "high precision"

    def start(self) -> None:
        """Installs the hooks."""
        self.probe.start(self.engine.model)
        if self.tap is not None:
            self.tap.start()
        # a rehearsal brings its own observer
        if self._emulation is not None and self._emulation.observer is None:
            self.statistics = Statistics(elements=ELEMENTS)
            self._emulation.observer = _Ear(self.statistics, self.noise)

    def stop(self) -> tuple[dict[str, list[list[Any]]], list[str]]:
        """Removes the hooks; returns (tables, what could not be read)."""
        began = time.perf_counter()
        self.probe.stop()
        notes: list[str] = []
        operands: list[list[Any]] = []
        if self.statistics is not None and self._emulation is not None:
            self._emulation.observer = None
            for track in self.statistics.tracks.values():
                names = (track.slot, track.side, track.copy, "+".join(track.gemms), track.format, track.scaling)
                operands.append([*names, *(getattr(track.samples[-1], name) for name in OPERANDS[WORDS:])])
        if self.tap is not None:
            self.tap.stop()
            operands = self.tap.rows()
            notes = [f"{count} operands not read: {why}" for why, count in self.tap.unread.items()]
            if not operands and not notes:
                notes = ["no quantized operand passed through Transformer Engine's GEMMs"]
        stored = self.tap is not None and any(quant.stored for quant in self.engine.run.policy.quants)
        if stored:
            # detaching such a parameter in a distributed optimizer changes which transpose Transformer Engine takes for the next step's dgrad
            notes.append("parameters stored in a low format are not measured: reading them would change the next step")
        measured = self.probe.rows(self.noise.ratios())
        weights = [] if stored else weight_rows(self.engine.tensors())
        self.seconds = time.perf_counter() - began
        return {"operands": operands, "linears": measured, "weights": weights}, notes


class _Ear:
    """The observer of an emulation: statistics of every operand, and samples of the operands of wgrad."""

    def __init__(self, statistics: Statistics, noise: Noise) -> None:
        self.statistics, self.noise = statistics, noise
        self._noted: set[tuple[str, str]] = set()
        statistics.step(1)

    def see(self, slot: str, gemm: Gemm, side: Side, high: torch.Tensor, operand: Operand, quantizer: Any) -> None:
        """See `emulation.gemm.Observer`."""
        self.statistics.see(slot, gemm, side, high, operand, quantizer)
        serves = side != "w" and (gemm == "wgrad" or quantizer.shares_copies(side))
        if not serves or (slot, side) in self._noted or not high.numel():
            return
        self._noted.add((slot, side))
        picked = spread(high.shape[1], SAMPLE, high.device)
        alpha = operand.alpha
        if alpha is not None and alpha.dim() == 2 and alpha.shape[1] == high.shape[1]:
            alpha = alpha[:, picked]
        values = operand.values[:, picked].float()
        self.noise.note(slot, side, high[:, picked], values if alpha is None else values * alpha)


Tables = dict[str, list[list[Any]]]
_NONE, _NUMBER, _NAN = 0.0, 1.0, 2.0
"""What a rank's cell contains; the maximum over ranks is the kind of the combined cell, so that a single NaN gives NaN."""


def worst_of_all(tables: Mapping[str, Sequence[Sequence[Any]]]) -> Tables:
    """Tables with the rows of all ranks, in which a row of several has the worst value of each column; every rank calls it, and gets the same.

    The rows' names are gathered first (ranks of one pipeline stage have the same names, which are sent once). Three all-reduces over the cells of all
    tables follow, 8 bytes per value: the kinds of the cells, their extremes in both directions, and the channels that belong to an outlier.
    """
    own: Tables = {name: [list(row) for row in tables.get(name, ())] for name in TABLES}
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return own
    words = {name: WORDS if columns is OPERANDS else 1 for name, columns in TABLES.items()}
    mine = {(name, *row[: words[name]]): row for name in TABLES for row in own[name]}
    names = dict.fromkeys(key for keys in from_all(list(mine)) for key in keys)
    cells = [(key, at) for key in names for at in range(words[key[0]], len(TABLES[key[0]]))]
    values = [mine[key][at] if key in mine else None for key, at in cells]
    found = _worst(values, [TABLES[key[0]][at] for key, at in cells])
    made: Tables = {name: [] for name in TABLES}
    left = iter(found)
    for key in names:
        made[key[0]].append([*key[1:], *(next(left) for _ in TABLES[key[0]][words[key[0]] :])])
    return made


def _worst(values: Sequence[Any], columns: Sequence[str]) -> list[Any]:
    """The worst value of each cell over all ranks."""
    held = largest([_NONE if value is None else _NAN if value != value else _NUMBER for value in values])
    # both directions in one reduction
    numbers = [-math.inf if value is None or value != value else float(value) for value in values]
    turned = [-math.inf if value is None or value != value else -float(value) for value in values]
    both = largest(numbers + turned)
    high, low = both[: len(values)], [-value for value in both[len(values) :]]
    found: list[Any] = []
    for i, column in enumerate(columns):
        pick: Callable[[float, float], float] = min if column in SMALLEST else max
        worst = max(high[i], low[i], key=abs) if column == "staleness" else pick(high[i], low[i])
        whole = column in ("nonfinite", "x_channel") and math.isfinite(worst)
        found.append(None if held[i] == _NONE else math.nan if held[i] == _NAN else int(worst) if whole else worst)
    return _channels(found, values, columns)


def _channels(found: list[Any], values: Sequence[Any], columns: Sequence[str]) -> list[Any]:
    """Sets x_channel to the channel of the rank with the worst x_outlier, instead of the largest channel number."""
    at = [i for i, column in enumerate(columns) if column == "x_channel"]
    outlier = {i: i - 1 for i in at if columns[i - 1] == "x_outlier"}
    own = [values[i] if values[i] is not None and values[outlier[i]] == found[outlier[i]] else -1 for i in outlier]
    for i, channel in zip(outlier, largest([float(value) for value in own]), strict=True):
        found[i] = int(channel) if channel >= 0 else found[i]
    return found


FEWEST = 6
"""Steps before the first judgement of tokens."""
LEAST = 0.5
"""Nats per token: a smaller difference from the usual value is never reported."""


class Tokens:
    """Counts the tokens that reach this rank's embedding, and scores each step's tokens by how often they occurred before.

    The score is the nats per token under the counts so far, plus one each: about the entropy of single tokens if nothing changes, and at least the
    logarithm of the vocabulary size for tokens that never occurred. A rank without an embedding sees none.
    """

    def __init__(self) -> None:
        self._hooks: list[Any] = []
        self._now: torch.Tensor | None = None
        self._seen: torch.Tensor | None = None
        self._recent: deque[float] = deque(maxlen=RECENT)
        self.on = False
        """Whether the current forward pass belongs to a training step."""

    def attach(self, chunks: list[Any]) -> None:
        """Hooks the embeddings of these model chunks, and releases those hooked before."""
        self.close()
        for chunk in chunks:
            for name, module in chunk.named_modules():
                if name.endswith("word_embeddings"):
                    self._hooks.append(module.register_forward_pre_hook(self._look))

    def close(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _look(self, module: Any, args: Any) -> None:
        if not self.on or not args or not isinstance(args[0], torch.Tensor) or args[0].is_floating_point():
            return
        tokens = args[0].detach().reshape(-1)
        if self._now is None:
            # ids are at most as large as the vocabulary of all tensor-parallel ranks
            size = int(getattr(module, "num_embeddings", 0)) or int(tokens.max()) + 1
            self._now = torch.zeros(size, device=tokens.device, dtype=torch.float32)
            self._seen = torch.zeros_like(self._now)
        self._now.index_add_(0, tokens, torch.ones_like(tokens, dtype=torch.float32))

    def step(self) -> tuple[float, float | None] | None:
        """(nats per token of the step that ended, the usual value if this one differs from it); None if no token was seen.

        Unusual tokens are not added to the counts, so that more of the same kind are unusual too.
        """
        if self._now is None or self._seen is None:
            return None
        now, self._now = self._now, torch.zeros_like(self._now)
        share = (self._seen + 1) / (self._seen.sum() + len(self._seen))
        nats = float((now * -share.log()).sum() / now.sum().clamp(min=1))
        before = sorted(self._recent)
        usual = before[len(before) // 2] if before else math.nan
        spread = sorted(abs(one - usual) for one in before)[len(before) // 2] if before else 0.0
        if len(before) >= FEWEST and nats > usual + max(LEAST, 12 * spread):
            return nats, usual
        self._recent.append(nats)
        self._seen += now
        return nats, None
