"""Tokenizers from files: what the files alone say is what the libraries say, and encoding is the libraries'."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from mpbridge.config.container import ConfigContainer
from mpbridge.data.tokenizer import identity, tokenizer
from mpbridge.errors import BadValue, Contradiction, DataError
from mpbridge.huggingface.tokenizers import tokenizer_files

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
        config = ConfigContainer(
            mixed_precision="bf16_mixed",
            model=shape,
            data={"tokenizer": str(place), "seq_length": 32},
            parallel={"tensor_model_parallel_size": tensor},
        )
        rows = config.resolved(tensor, training=False).facts.shape.vocab_size
        assert rows % step == 0
        assert size <= rows < size + step
    config.data.vocab_divisible_by = 1000
    config.parallel.tensor_model_parallel_size = 1
    assert config.resolved(training=False).facts.shape.vocab_size == 1000


def test_the_token_that_ends_a_text_can_be_given(tmp_path: Path) -> None:
    place = words(tmp_path / "tok", end=None)
    with pytest.raises(DataError, match=r"does not say which token ends a text: give it, as in data.end_of_text"):
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


def test_sentencepiece_encodes_as_its_library_does(tmp_path: Path) -> None:
    library = pytest.importorskip("sentencepiece", reason="pip install 'mpbridge[hf]'")
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT), model_prefix=str(tmp_path / "tokenizer"), vocab_size=70, minloglevel=2, hard_vocab_limit=False
    )  # fmt: skip
    own = library.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    made = tokenizer(str(tmp_path))
    assert (made.vocab_size, made.eod) == (own.vocab_size(), own.eos_id())
    assert made.tokenize(TEXT[0]) == own.encode(TEXT[0])


def ranks(path: Path) -> Path:
    tokens = [bytes([n]) for n in range(256)] + [b"th", b"the", b" the"]
    path.write_text("".join(f"{base64.b64encode(token).decode()} {n}\n" for n, token in enumerate(tokens)))
    return path


def test_tiktokens_ranks_encode_as_its_library_does(tmp_path: Path) -> None:
    library = pytest.importorskip("tiktoken", reason="pip install 'mpbridge[hf]'")
    made = tokenizer(str(ranks(tmp_path / "own.tiktoken")))
    assert (made.vocab_size, made.eod) == (260, 259)
    assert made.tokenize("the the") == [257, 258]
    assert library.Encoding(
        "x", pat_str=r"\S+|\s+", mergeable_ranks={bytes([n]): n for n in range(256)}, special_tokens={}
    ).encode_ordinary("é") == made.tokenize("é")


def test_files_alone_say_the_size(tmp_path: Path) -> None:
    found = tokenizer_files(str(ranks(tmp_path / "tokenizer.model")))  # as Llama 3 calls its own
    assert (found.kind, found.size, found.end) == ("tiktoken", 260, 259)
    unigram = {
        "model": {"type": "Unigram", "vocab": [["<unk>", 0.0], ["a", -1.0]]},
        "added_tokens": [{"id": 7, "content": "</s>"}],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(unigram))
    found = tokenizer_files(str(tmp_path))
    assert (found.kind, found.size, found.end) == ("json", 8, 7)


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
    (tmp_path / "tokenizer.json").rename(tmp_path / "tokenizer.model")
    with pytest.raises(BadValue, match="a SentencePiece model, or lines of tiktoken"):
        tokenizer_files(str(tmp_path / "tokenizer.model"))


def test_a_name_that_is_nothing_says_what_would_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(Contradiction, match=r"mpbridge data inspect --tokenizer gpt2"):
        ConfigContainer(
            mixed_precision="bf16_mixed",
            model={"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4},
            data={"tokenizer": "gpt2", "seq_length": 32},
        ).resolved(training=False)
    # a copy in the cache is enough
    copy = tmp_path / "hub" / "models--gpt2"
    (copy / "refs").mkdir(parents=True)
    (copy / "refs" / "main").write_text("abc")
    (copy / "snapshots" / "abc").mkdir(parents=True)
    ranks(copy / "snapshots" / "abc" / "tokenizer.model")
    assert tokenizer_files("gpt2").size == 260
    for name, said in (
        ("./none", "expected 'byte', a folder with tokenizer.json"),
        (str(tmp_path), "holds none of tokenizer.json"),
    ):
        with pytest.raises(BadValue, match=said):
            tokenizer_files(name)


def test_two_tokenizers_have_two_identities(tmp_path: Path) -> None:
    one, two = words(tmp_path / "one"), words(tmp_path / "two", end="</s>")
    assert identity(tokenizer(str(one))) != identity(tokenizer(str(two)))
    assert identity(tokenizer(str(one))) != identity(tokenizer(str(one), "<pad>"))
