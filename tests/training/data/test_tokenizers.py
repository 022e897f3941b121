"""Tokenizers from files: what the files alone say is what the libraries say, and encoding is the libraries'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mpbridge.common.errors import BadValue, Contradiction, DataError
from mpbridge.settings.container import ConfigContainer
from mpbridge.settings.huggingface.tokenizers import tokenizer_files
from mpbridge.training.data.sources import identity, tokenizer

TEXT = ["the quick brown fox jumps over the lazy dog", "pack my box with five dozen liquor jugs", "été ☃ 中文"] * 20


def words(path: Path, *, end: str | None = "<|endoftext|>") -> Path:
    """A tokenizer.json of the library's own making, in a folder."""
    import tokenizers as library

    made = library.Tokenizer(library.models.BPE())
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = library.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<pad>", *([end] if end else [])], initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )  # fmt: skip
    made.train_from_iterator(TEXT, trainer)
    made.enable_truncation(4)
    made.enable_padding(pad_id=0, pad_token="<pad>", length=8)
    path.mkdir()
    made.save(str(path / "tokenizer.json"))
    return path


@pytest.mark.parametrize("by", ["folder", "file"])
def test_a_tokenizer_json_encodes_as_its_library_does(tmp_path: Path, by: str) -> None:
    place = words(tmp_path / "tok")
    import tokenizers as library

    own = library.Tokenizer.from_file(str(place / "tokenizer.json"))
    made = tokenizer(str(place if by == "folder" else place / "tokenizer.json"))
    assert (made.vocab_size, made.eod) == (own.get_vocab_size(), own.token_to_id("<|endoftext|>"))
    own.no_truncation()
    own.no_padding()
    own.decoder = library.decoders.ByteLevel()
    for text in TEXT[:3]:
        assert made.tokenize(text) == own.encode(text, add_special_tokens=False).ids
    # what stands in a text is text, and ends none
    assert made.eod not in made.tokenize("a <|endoftext|> b")
    assert own.decode(made.tokenize("a <|endoftext|> b")) == "a <|endoftext|> b"


def test_the_vocabulary_follows_from_the_tokenizer(tmp_path: Path) -> None:
    place = words(tmp_path / "tok")
    size = tokenizer_files(str(place)).size
    shape = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    for tensor, step in ((1, 64), (2, 128)):
        data, parallel = {"tokenizer": str(place), "seq_length": 32}, {"tensor_model_parallel_size": tensor}
        config = ConfigContainer(mixed_precision="bf16_mixed", model=shape, data=data, parallel=parallel)
        rows = config.resolved(tensor, training=False).facts.shape.vocab_size
        assert rows % step == 0
        assert size <= rows < size + step
    config.data.vocab_divisible_by = 1000
    config.parallel.tensor_model_parallel_size = 1
    assert config.resolved(training=False).facts.shape.vocab_size == 1000


def test_the_token_that_ends_a_text_can_be_given(tmp_path: Path) -> None:
    place = words(tmp_path / "tok", end=None)
    with pytest.raises(DataError, match=r"does not say which token ends a text: set it, for example data.end_of_text"):
        tokenizer(str(place))
    assert tokenizer(str(place), "<pad>").eod == 0
    assert tokenizer(str(place), 5).eod == 5
    (place / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<pad>"}}))
    assert tokenizer(str(place)).eod == 0
    for strange in ("<nothing>", 100_000):
        with pytest.raises(DataError, match="has no such token"):
            tokenizer(str(place), strange)
    with pytest.raises(DataError, match=r"with data.tokenizer=byte it is 256"):
        tokenizer("byte", 0)


def test_files_alone_say_the_size(tmp_path: Path) -> None:
    model = {"type": "Unigram", "vocab": [["<unk>", 0.0], ["a", -1.0]]}
    unigram = {"model": model, "added_tokens": [{"id": 7, "content": "</s>"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(unigram))
    found = tokenizer_files(str(tmp_path))
    assert (found.size, found.end) == (8, 7)


def test_another_form_is_refused_with_the_line_that_makes_tokenizer_json(tmp_path: Path) -> None:
    for name in ("tokenizer.model", "vocab.json"):
        (tmp_path / name).write_text("{}")
    for place in (tmp_path, tmp_path / "tokenizer.model"):
        with pytest.raises(BadValue, match=r"no tokenizer.json; .*from_pretrained\('FOLDER'\).save_pretrained"):
            tokenizer_files(str(place))


BAD: dict[str, tuple[Any, str]] = {
    "no vocabulary": ("{}", "expected a tokenizer of the library tokenizers, with model.vocab"),
    "no JSON": ("{", "is not JSON"),
    "deep JSON": ("[" * 100_000, "nested too deeply"),
    "a text for a number": ('{"model": {"vocab": {"a": "b"}}}', "expected tokens with numbers from 0"),
    "a huge number": ('{"model": {"vocab": {"a": 99999999999}}}', "expected tokens with numbers from 0"),
}


@pytest.mark.parametrize(("content", "said"), BAD.values(), ids=BAD)
def test_a_damaged_tokenizer_is_refused_by_name(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(BadValue, match=said):
        tokenizer_files(str(tmp_path))


def test_a_name_that_is_nothing_says_what_would_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    model = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    run = ConfigContainer(mixed_precision="bf16", model=model, data={"tokenizer": "gpt2", "seq_length": 32})
    with pytest.raises(Contradiction, match=r"mpbridge data inspect --tokenizer gpt2"):
        run.resolved(training=False)
    # a copy in the cache is enough
    copy = tmp_path / "hub" / "models--gpt2"
    (copy / "refs").mkdir(parents=True)
    (copy / "refs" / "main").write_text("abc")
    (copy / "snapshots").mkdir(parents=True)
    vocabulary(copy / "snapshots" / "abc", "</s>")
    assert tokenizer_files("gpt2").size == 2
    with pytest.raises(BadValue, match=r"expected 'byte', a tokenizer\.json or a folder with one"):
        tokenizer_files("./none")
    with pytest.raises(BadValue, match=r"contains no tokenizer\.json"):
        tokenizer_files(str(tmp_path))


def test_text_that_a_tokenizer_has_no_tokens_for_is_not_lost_in_silence(tmp_path: Path) -> None:
    import tokenizers as library

    from mpbridge.training.data.prepare import prepare

    place = tmp_path / "tok"
    place.mkdir()
    library.Tokenizer(library.models.BPE(vocab={"a": 0, "</s>": 1}, merges=[])).save(str(place / "tokenizer.json"))
    (tmp_path / "a.jsonl").write_text('{"text": "aa"}\n{"text": "ccc"}\n')
    done = prepare([tmp_path / "a.jsonl"], cache=tmp_path / "cache", tokenizer_name=str(place))
    assert (done.documents, done.skipped) == (1, {"no token for any of it": 1})


def test_two_tokenizers_have_two_identities(tmp_path: Path) -> None:
    one, two = words(tmp_path / "one"), words(tmp_path / "two", end="</s>")
    assert identity(tokenizer(str(one))) != identity(tokenizer(str(two)))
    assert identity(tokenizer(str(one))) != identity(tokenizer(str(one), "<pad>"))


def vocabulary(path: Path, *special: str, ordinary: str = "a") -> Path:
    """A folder with a tokenizer.json of hand-written tokens: one ordinary one, then special ones numbered from 1."""
    added = [{"id": number, "content": text, "special": True} for number, text in enumerate(special, 1)]
    data = {"model": {"type": "BPE", "vocab": {ordinary: 0}, "merges": []}, "added_tokens": added}
    path.mkdir()
    (path / "tokenizer.json").write_text(json.dumps(data))
    return path


def say(place: Path, **files: Any) -> None:
    for name, content in files.items():
        (place / f"{name}.json").write_text(json.dumps(content))


def test_who_says_which_token_ends_a_text_is_asked_in_order(tmp_path: Path) -> None:
    place = vocabulary(tmp_path / "tok", "</s>", "<end>", "<other>")

    def found() -> tuple[int | None, str]:
        files = tokenizer_files(str(place))
        return files.end, files.ends_by.partition(",")[0]

    assert found() == (1, "by its name only")  # last: a usual name, where it is the only one
    say(place, config={"eos_token_id": 2})
    assert found() == (2, "eos_token_id of config.json")  # before that: config.json
    say(place, config={"eos_token_id": [2, 3]})
    assert found() == (None, "eos_token_id of config.json lists 2")  # several are no answer
    say(place, special_tokens_map={"eos_token": "<other>"})
    assert found() == (3, "eos_token of special_tokens_map.json")  # which another file can decide
    say(place, tokenizer_config={"eos_token": {"content": "<end>"}})
    both = "eos_token of tokenizer_config.json says 2 and eos_token of special_tokens_map.json says 3"
    assert found() == (None, both)
    say(place, special_tokens_map={}, config={"eos_token_id": 3})
    assert found() == (None, "eos_token of tokenizer_config.json says 2")  # against config.json as well
    say(place, config={})
    assert found() == (2, "eos_token of tokenizer_config.json")
    assert tokenizer_files(str(place), "<other>").ends_by == "data.end_of_text"  # before everything
    two = tokenizer_files(str(vocabulary(tmp_path / "two", "</s>", "<|endoftext|>")))
    assert (two.end, two.ends_by) == (None, "'<|endoftext|>' and '</s>' are both possible")


def test_inspect_reads_as_a_sentence_where_a_name_decides(tmp_path: Path, cli) -> None:
    assert "as said by   its name only, since" in cli("data inspect --tokenizer", vocabulary(tmp_path / "tok", "</s>"))


def test_who_says_which_token_fills_up_is_asked_in_order(tmp_path: Path) -> None:
    place = vocabulary(tmp_path / "tok", "</s>", "<pad>", "<fill>")

    def found() -> tuple[int | None, str]:
        files = tokenizer_files(str(place))
        return files.pad, files.pad_by

    assert found() == (None, "")  # a name alone is no answer
    say(place, config={"pad_token_id": 3})
    assert found() == (3, "pad_token_id of config.json")
    whole = json.loads((place / "tokenizer.json").read_text())
    say(place, tokenizer=whole | {"padding": {"pad_token": "<pad>", "pad_id": 2}})
    assert found() == (2, "padding of tokenizer.json")
    say(place, special_tokens_map={"pad_token": "<fill>"})
    assert found() == (3, "pad_token of special_tokens_map.json")
    say(place, tokenizer_config={"pad_token": "<pad>"})
    assert found() == (2, "pad_token of tokenizer_config.json")
    say(place, tokenizer_config={"pad_token": "a"})
    assert found() == (None, "pad_token of tokenizer_config.json says 0, which is not a special token")
    say(place, tokenizer_config={"pad_token": "</s>"})
    assert found() == (None, "pad_token of tokenizer_config.json says 1, which ends a text")


def test_a_function_that_only_a_file_names_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("data: {tokenizer: 'evil:fn'}")
    (tmp_path / "plain.yaml").write_text("mixed_precision: fp32")
    given = ConfigContainer.load(tmp_path / "plain.yaml")
    given.data.tokenizer = "mine:fn"
    said = ConfigContainer.load(tmp_path / "run.yaml", ["data.tokenizer='mine:fn'"], check=False)
    theirs = ConfigContainer.load(tmp_path / "run.yaml", ["mixed_precision=fp32"], check=False)
    assert [one.may_be_code("data.tokenizer") for one in (given, said, ConfigContainer(), theirs)] == [True] * 3 + [False]  # fmt: skip
    with pytest.raises(DataError, match=r"files do not run code.*\(data.tokenizer=evil:fn\)"):
        tokenizer("evil:fn", code=theirs.may_be_code("data.tokenizer"))


def test_no_loss_is_taken_from_the_padding_of_a_pair(tmp_path: Path) -> None:
    import numpy as np
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    from mpbridge.training.data.batches import open_corpus

    place = words(tmp_path / "tok")  # whose padding is token 0
    pair = IndexedDatasetBuilder(str(tmp_path / "pair.bin"), dtype=np.uint16)
    for _ in range(40):
        pair.add_document(torch.tensor([5, 6, 7, 1, 0, 0]), [6])
    pair.finalize(str(tmp_path / "pair.idx"))
    data = {"corpus": str(tmp_path / "pair"), "tokenizer": str(place), "split": "1,0,0", "cache_dir": str(tmp_path)}
    sample = open_corpus(data, seq_length=12, seed=1).dataset("train", 4)[0]
    assert torch.equal(sample["loss_mask"] == 0, sample["labels"] == 0)
    assert sample["loss_mask"].sum() == 8  # two of every six tokens fill up
