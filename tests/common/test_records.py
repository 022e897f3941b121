"""Frozen classes of common/records.py behave as the standard library's."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from dataclasses import field
from typing import Any, ClassVar

import pytest

from mpbridge.common import records

MAKERS: dict[str, Callable[..., Any]] = {"ours": records.dataclass, "theirs": dataclasses.dataclass}


def classes(make: Callable[..., Any]) -> dict[str, Any]:
    """The same classes by either maker, under the same qualified names."""

    @make(frozen=True, slots=True, kw_only=True)
    class Words:
        """Some."""

        first: int
        second: str = "two"
        third: list[int] = field(default_factory=lambda: [3])
        hidden: int = field(default=4, repr=False, compare=False)
        counted: int = field(default=5, hash=False)
        own: int = field(default=6, init=False)
        made: dict[str, int] = field(default_factory=dict, init=False)
        shared: ClassVar[int] = 7

        @property
        def double(self) -> int:
            return 2 * self.first

    @make(frozen=True)
    class Placed:
        """Some."""

        first: Any
        second: Any = 2
        third: Any = field(default=3, kw_only=True)

        def __post_init__(self) -> None:
            if self.first == "bad":
                raise ValueError("a bad one")

    @make(frozen=True, slots=True)
    class One:
        """Some."""

        only: Any

    @make(frozen=True, slots=True)
    class Nothing:
        """Some."""

    @make(frozen=True, slots=True)
    class OwnEquality:
        """Some."""

        first: int
        second: int = 0

        def __eq__(self, other: object) -> bool:
            return isinstance(other, OwnEquality) and self.first == other.first

    @make(frozen=True)
    class OwnText:
        """Some."""

        first: int

        def __repr__(self) -> str:
            return f"own {self.first}"

        def __hash__(self) -> int:
            return 12

    @make(frozen=True, slots=True)
    class Derived(One):
        """Some."""

        more: int = 1

    @make(frozen=True)
    class Free(Placed):
        """Some."""

    class Plain(Placed):
        """No dataclass itself."""

    found = (Words, Placed, One, Nothing, OwnEquality, OwnText, Derived, Free, Plain)
    return {one.__name__: one for one in found}


def tried(ask: Callable[[], Any]) -> Any:
    """The answer, or the error."""
    try:
        return ask()
    except Exception as error:
        return type(error), str(error)


OBJECTS: tuple[tuple[str, tuple[Any, ...], dict[str, Any]], ...] = (
    ("Words", (), {"first": 1}), ("Words", (), {"first": 1, "hidden": 9}), ("Words", (), {"first": 1, "counted": 9}), ("Words", (), {"first": 2, "third": []}),
    ("Words", (1,), {}), ("Words", (), {}), ("Words", (), {"first": 1, "own": 1}), ("Words", (), {"first": 1, "wrong": 1}),
    ("Placed", (1,), {}), ("Placed", (1, 3), {}), ("Placed", (1, 2, 3), {}), ("Placed", (), {"first": (1, 2)}), ("Placed", ("bad",), {}), ("Placed", ([1],), {}),
    ("One", (1,), {}), ("One", ((1,),), {}), ("Nothing", (), {}), ("OwnEquality", (1, 5), {}), ("OwnEquality", (1, 6), {}),
    ("OwnText", (1,), {}), ("Derived", (1,), {}), ("Free", (1,), {}), ("Plain", (1,), {}),
)  # fmt: skip
QUESTIONS: dict[str, Callable[[Any], Any]] = {
    "text": repr,
    "copy": lambda one: repr(copy.copy(one)),
    "deep copy": lambda one: repr(copy.deepcopy(one)),
    "data": dataclasses.asdict,
    "tuple": dataclasses.astuple,
    "replaced": lambda one: repr(dataclasses.replace(one, first=5)),
    "assigned": lambda one: setattr(one, "first", 5),
    "another assigned": lambda one: setattr(one, "another", 5),
    "deleted": lambda one: delattr(one, "first"),
    "itself": lambda one: (
        one == one,
        one == copy.copy(one),
        one == 1,
        one != copy.copy(one),
        hasattr(one, "__dict__"),
    ),
    "state": lambda one: one.__getstate__() if not hasattr(one, "__dict__") else vars(one),
}


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("index", range(len(OBJECTS)))
def test_an_object_answers_as_the_standard_librarys(index: int, question: str) -> None:
    name, words, named = OBJECTS[index]
    answers = {}
    for who, make in MAKERS.items():
        cls = classes(make)[name]
        answers[who] = tried(lambda cls=cls: QUESTIONS[question](cls(*words, **named)))
    if (
        "super(type, obj)" in str(answers["theirs"]) and name != "Derived"
    ):  # the standard library's own fault with slots; it makes what derives
        assert answers["ours"][0] is dataclasses.FrozenInstanceError
    else:
        assert str(answers["ours"]) == str(answers["theirs"])


def test_equality_and_hash_are_those_of_the_standard_library() -> None:
    def table(make: Callable[..., Any]) -> list[Any]:
        known = classes(make)
        made = [one for name, words, named in OBJECTS if not isinstance(one := tried(lambda name=name, words=words, named=named: known[name](*words, **named)), tuple)]  # fmt: skip
        hashes = [tried(lambda one=one: hash(one)) for one in made]
        return [len(made), hashes, [[a == b for a in made] for b in made]]

    assert table(records.dataclass) == table(dataclasses.dataclass)


@pytest.mark.parametrize("name", ["Words", "Placed", "One", "Nothing", "OwnEquality", "OwnText", "Derived", "Free"])
def test_a_class_looks_as_the_standard_librarys(name: str) -> None:
    def seen(make: Callable[..., Any]) -> dict[str, Any]:
        cls = classes(make)[name]
        return {
            "signature": str(inspect.signature(cls)),
            "fields": [(one.name, one.type, one.init, one.kw_only) for one in dataclasses.fields(cls)],
            "match": cls.__match_args__,
            "slots": getattr(cls, "__slots__", None),
            "parameters": cls.__dataclass_params__.frozen,
            "names": {word: getattr(cls, word).__qualname__ for word in ("__init__", "__eq__", "__setattr__")},
            "annotations": cls.__init__.__annotations__,
            "members": {
                word for word in vars(cls) if word not in ("__firstlineno__", "__static_attributes__", "__replace__")
            },
        }

    assert seen(records.dataclass) == seen(dataclasses.dataclass)


@records.dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Found by its name when a pickle is read."""

    first: int
    again: Any = None


def test_pickles_and_records_that_hold_themselves() -> None:
    assert pickle.loads(pickle.dumps(Stored(first=1, again=(2,)))) == Stored(first=1, again=(2,))
    held: list[Any] = []
    one = Stored(first=1, again=held)
    held.append(one)
    assert repr(one) == "Stored(first=1, again=[...])"


def test_a_frozen_class_of_somebody_elses_may_derive_from_ours() -> None:
    @dataclasses.dataclass(frozen=True)
    class Theirs(Stored):
        more: int = 1

    assert Theirs(first=1).more == 1
    with pytest.raises(TypeError, match="frozen"):
        dataclasses.dataclass(type("Loose", (Stored,), {}))
