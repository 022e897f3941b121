"""Batches: order, resuming, sharing among ranks, streams without a length."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mpbridge.common.errors import DataError
from mpbridge.settings.container import ConfigContainer
from mpbridge.training.data.batches import FIELDS, Feed
from mpbridge.training.data.prepare import pair
from mpbridge.training.process import process_group

SEQ = 16


def batches(run: Any, split: str, *more: int, **named: int) -> Any:
    return Feed(run).batches(split, *more, **named)


def _run(tmp_path: Path, corpus: Any = None, *, vocab_size: int = 320, cache: str = "cache", **train: Any) -> Any:
    """The attributes of a Run that the data room reads."""
    source = tmp_path / "a.txt"
    if not source.exists():
        source.write_text("".join(f"line number {n}\n" for n in range(2000)))
    own = {"micro_batch_size": 2, "global_batch_size": 4, "train_iters": 6, "eval_iters": 1, "eval_interval": 3}
    data = {"corpus": corpus or str(source), "tokenizer": "byte", "seq_length": SEQ, "split": "90,10"}
    return SimpleNamespace(
        train={**own, "seed": 1, **train},
        data={**data, "cache_dir": str(tmp_path / cache)},
        facts=SimpleNamespace(shape=SimpleNamespace(vocab_size=vocab_size, seq_length=SEQ)),
        container=ConfigContainer(),
    )


def _take(stream: Iterator[Any], count: int) -> list[torch.Tensor]:
    return [batch["tokens"] for batch in islice(stream, count)]


class Endless:
    """A user's iterable: knows no length and says so loudly."""

    asked = 0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for start in range(20):
            yield {"tokens": torch.arange(start, start + SEQ + 1)}

    def __len__(self) -> int:
        Endless.asked += 1
        raise TypeError("no length")


def test_batch_is_what_the_contract_says(tmp_path: Path) -> None:
    batch = next(batches(_run(tmp_path), "train"))
    assert set(batch) == set(FIELDS)
    assert {name: value.dtype for name, value in batch.items()} == {
        "tokens": torch.int64, "labels": torch.int64, "position_ids": torch.int64, "loss_mask": torch.float32,
    }  # fmt: skip
    assert all(value.shape == (2, SEQ) for value in batch.values())
    assert torch.equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])


def test_resuming_continues_with_the_next_sample(tmp_path: Path) -> None:
    run = _run(tmp_path)
    whole = _take(batches(run, "train"), 12)
    resumed = _take(batches(run, "train", consumed=8), 8)
    assert all(torch.equal(a, b) for a, b in zip(whole[4:], resumed, strict=True))
    assert not torch.equal(whole[0], whole[4])


def test_two_ranks_share_the_samples_of_one(tmp_path: Path) -> None:
    run = _run(tmp_path)
    one = _take(batches(run, "train"), 6)
    shared = [_take(batches(run, "train", 0, rank, 2), 3) for rank in (0, 1)]
    assert all(torch.equal(one[2 * step + rank], shared[rank][step]) for step in range(3) for rank in (0, 1))


def test_validation_text_is_not_training_text(tmp_path: Path) -> None:
    run = _run(tmp_path, train_iters=400)
    seen = {row.numpy().tobytes() for tokens in _take(batches(run, "train"), 800) for row in tokens}
    held_out = {row.numpy().tobytes() for tokens in _take(batches(run, "valid"), 2) for row in tokens}
    assert held_out
    assert not seen & held_out


def test_empty_split_is_an_error_not_a_hang(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="leaves nothing for 'test'"):
        next(batches(_run(tmp_path), "test"))


def test_stream_without_length_is_never_asked_for_one(tmp_path: Path) -> None:
    run = _run(tmp_path, eval_interval=None)
    feed = Feed(run, dataset=Endless())
    assert feed.corpus is None
    stream = feed.batches("train", consumed=4, dp_rank=1, dp_size=2)
    # samples 6 and 7, then 10 and 11, then over the end of the 20 into the next round
    assert [tokens[:, 0].tolist() for tokens in _take(stream, 5)] == [[6, 7], [10, 11], [14, 15], [18, 19], [2, 3]]
    assert Endless.asked == 0


def test_stream_that_cannot_start_again_says_so(tmp_path: Path) -> None:
    feed = Feed(_run(tmp_path, eval_interval=None), dataset=iter([{"tokens": torch.arange(SEQ + 1)}] * 3))
    with pytest.raises(DataError, match="ended after 3 samples"):
        _take(feed.batches("train"), 2)


def test_samples_that_cannot_begin_again_go_on_where_they_are_after_a_rollback(tmp_path: Path) -> None:
    feed = Feed(_run(tmp_path, eval_interval=None), dataset=iter(Endless()))
    assert [tokens[0, 0] for tokens in _take(feed.batches("train"), 4)] == [0, 2, 4, 6]
    assert [tokens[0, 0] for tokens in _take(feed.batches("train", 8), 2)] == [8, 10]
    resumed = Feed(_run(tmp_path, eval_interval=None), dataset=iter(Endless()))
    assert [tokens[0, 0] for tokens in _take(resumed.batches("train", 8, 1, 2), 2)] == [10, 14]


def test_sample_of_another_length_is_named(tmp_path: Path) -> None:
    feed = Feed(_run(tmp_path, eval_interval=None), dataset=[{"tokens": torch.arange(5)}] * 4)
    with pytest.raises(DataError, match=r"shape \(4,\), expected \(16,\)"):
        _take(feed.batches("train"), 1)


def test_labels_that_are_not_to_be_learned_are_masked_and_others_outside_the_vocabulary_refused(tmp_path: Path) -> None:
    def batch(label: int, **mask: torch.Tensor) -> Any:
        labels = torch.tensor([label] * 8 + [5] * 8)
        sample = {"tokens": torch.arange(SEQ), "labels": labels, **mask}
        return next(Feed(_run(tmp_path, eval_interval=None), dataset=[sample] * 4).batches("train"))

    found = batch(-100)  # torch.nn.functional.cross_entropy's ignore_index
    assert found["loss_mask"].tolist() == [[0.0] * 8 + [1.0] * 8] * 2
    assert found["labels"].tolist() == [[0] * 8 + [5] * 8] * 2
    masked = torch.tensor([0.0] * 8 + [0.5] * 8)
    assert torch.equal(batch(90_000, loss_mask=masked)["loss_mask"][0], masked)
    for label, mask in ((90_000, {}), (-1, {}), (-100, {"loss_mask": torch.ones(SEQ)})):
        with pytest.raises(DataError, match=rf"label {label} in the data, .*has loss_mask=0"):
            batch(label, **mask)


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: data * 2])
def test_tokens_of_another_length_than_the_index_says_are_refused_before_the_first_step(tmp_path, damage) -> None:
    prefix = _pair(tmp_path / "pair", [[7] * 40, []] * 20)  # its last sequence is empty
    assert len(_take(batches(_run(tmp_path, corpus=prefix), "train"), 12)) == 12
    tokens = Path(f"{prefix}.bin")
    tokens.write_bytes(damage(tokens.read_bytes()))
    with pytest.raises(DataError, match=r"pair\.bin has [\d,]+ bytes, its index requires 3,200"):
        batches(_run(tmp_path, corpus=prefix), "train")


@pytest.mark.parametrize("place", [34 + 4 * 3, 34 + 4 * 20 + 8 * 3])
def test_a_damaged_length_or_place_in_the_middle_of_an_index_is_refused(tmp_path, place) -> None:
    prefix = _pair(tmp_path / "pair", [[7] * 40] * 20)
    index = Path(f"{prefix}.idx")
    content = bytearray(index.read_bytes())
    content[place + 1] = 77
    index.write_bytes(content)
    for reads in (lambda: pair(prefix), lambda: batches(_run(tmp_path, corpus=prefix), "train")):
        with pytest.raises(DataError, match=r"pair\.idx is damaged: sequence [23] does not end where the next begins"):
            reads()


def test_a_mask_in_a_column_is_one_and_the_part_of_another_length_is_named(tmp_path: Path) -> None:
    def batch(**parts: torch.Tensor) -> Any:
        sample = {"tokens": torch.arange(SEQ), "labels": torch.arange(SEQ), **parts}
        return next(Feed(_run(tmp_path, eval_interval=None), dataset=[sample] * 4).batches("train"))

    assert torch.equal(batch(loss_mask=torch.ones(SEQ, 1))["loss_mask"], torch.ones(2, SEQ))
    for name in ("tokens", "labels", "loss_mask"):
        with pytest.raises(DataError, match=rf"{name} of a sample .* shape \(8,\), expected \(16,\)"):
            batch(**{name: torch.ones(8)})


def test_tokenizer_that_does_not_fit_the_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"vocab_size=258 is too small.*259"):
        next(batches(_run(tmp_path, vocab_size=258), "train"))


def _pair(prefix: Path, documents: list[list[int]]) -> str:
    """A pair that megatron-core itself writes."""
    import numpy as np
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    for document in documents:
        builder.add_document(np.array(document, dtype=np.int32), [len(document)])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def test_other_text_packed_to_the_same_prefix_is_read_by_an_index_of_its_own(tmp_path: Path) -> None:
    def read(cache: str) -> list[torch.Tensor]:
        return _take(batches(_run(tmp_path, corpus=prefix, cache=cache), "train"), 12)

    prefix = _pair(tmp_path / "pair", [list(range(40))] * 20)
    read("shared")
    _pair(tmp_path / "pair", [list(range(100, 100 + 10 * n)) for n in range(1, 12)])
    assert torch.equal(torch.cat(read("shared")), torch.cat(read("alone")))


def test_foreign_tokens_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    prefix = _pair(tmp_path / "pair", [[5000] * 40] * 20)
    with pytest.raises(DataError, match="token 5000 in the data"):
        next(batches(_run(tmp_path, corpus=prefix), "train"))


def test_several_prefixes_are_blended_for_as_long_as_the_run_lasts(tmp_path: Path) -> None:
    from mpbridge.training.data.prepare import prepare

    pairs = []
    for letter in "ab":
        source = tmp_path / f"{letter}.txt"
        source.write_text(f"{letter * 30}\n" * 100)
        pairs.append(prepare([source], cache=tmp_path / "pairs").prefixes[0])
    with process_group(False):
        tokens = torch.cat(_take(batches(_run(tmp_path, corpus=pairs, train_iters=300), "train"), 600))
    share = (tokens == ord("a")).sum() / ((tokens == ord("a")).sum() + (tokens == ord("b")).sum())
    assert 0.4 < share < 0.6


def test_half_an_index_is_named_and_not_used(tmp_path: Path) -> None:
    run = _run(tmp_path)
    next(batches(run, "train"))
    (index,) = (tmp_path / "cache" / "indices").glob("*/*shuffle_index.npy")
    index.write_bytes(index.read_bytes()[:40])
    with pytest.raises(DataError, match="delete that folder"):
        next(batches(run, "train"))


def test_a_disk_without_room_for_the_index_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(numpy, "save", full)
    with pytest.raises(DataError, match=r"cannot be used \(.*No space left on device\); make room there"):
        next(batches(_run(tmp_path), "train"))
