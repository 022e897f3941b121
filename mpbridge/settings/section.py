"""A section of ConfigContainer: a mapping whose settings are also attributes. Its types for editors and mypy are in typed.pyi."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from mpbridge.common.errors import UnknownName
from mpbridge.settings.schema import settings


class Section(dict[str, Any]):
    """The settings given for one section: `section["lr"]` and `section.lr` are the same setting.

    Reading a setting that was not given returns its default and stores nothing. An attribute that is not a setting raises UnknownName with the
    nearest name; keys are checked by `ConfigContainer.faults`, all at once.
    """

    __slots__ = ("_section",)
    _section: str

    def __init__(self, section: str, given: Mapping[str, Any]) -> None:
        super().__init__(given)
        object.__setattr__(self, "_section", section)

    if not TYPE_CHECKING:  # seen by mypy, these would accept any name

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):  # copy and pickle look up methods that a mapping does not have
                raise AttributeError(name)
            if name in self:
                return self[name]
            # a mutable default is copied, so the caller may change it
            return copy.copy(self._known(name).default)

        def __setattr__(self, name: str, value: Any) -> None:
            self._known(name)
            self[name] = value

        def __delattr__(self, name: str) -> None:
            self._known(name)
            self.pop(name, None)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *settings(self._section, latent=True)})

    def _ipython_key_completions_(self) -> list[str]:
        """The completions that a notebook offers after `section["`."""
        return sorted(settings(self._section, latent=True))

    def _repr_html_(self) -> str:
        """HTML for notebooks."""
        from mpbridge.common.tables.table import facts

        return facts(self._section, self).html()

    def __copy__(self) -> Self:
        return type(self)(self._section, self)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._section, dict(self))

    def _known(self, name: str) -> Any:
        known = settings(self._section, latent=True)
        if name not in known:
            raise UnknownName(f"setting in {self._section}", name, known)
        return known[name]
