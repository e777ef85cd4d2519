"""Attribute patches and import hooks that can be taken back without a trace."""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Final

__all__ = ["ImportWatch", "Patches", "loaded"]

_MISSING: Final = object()


class Patches:
    """Attributes that were replaced, in order, so that they can be put back."""

    def __init__(self) -> None:
        self._done: list[tuple[Any, str, Any, Any]] = []

    def set(self, owner: Any, name: str, new: Any) -> None:
        """Replace ``owner.name``; an attribute that ``owner`` only inherits is shadowed."""
        self._done.append((owner, name, vars(owner).get(name, _MISSING), new))
        setattr(owner, name, new)

    def wrap(self, owner: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> bool:
        """Replace the function ``owner.name`` by ``make(function)``, which keeps its name and doc.

        Returns
        -------
        bool
            False if there is no such attribute: nothing was done then.
        """
        original = getattr(owner, name, None)
        if original is None:
            return False
        wrapper = make(original)
        with contextlib.suppress(AttributeError, TypeError):  # a callable object without a dict
            functools.update_wrapper(wrapper, original)
        self.set(owner, name, wrapper)
        return True

    def undo(self) -> list[str]:
        """Put everything back, last first.

        Returns
        -------
        list of str
            Attributes that somebody else has replaced since: they are left alone.
        """
        left = []
        for owner, name, old, new in reversed(self._done):
            if vars(owner).get(name, _MISSING) is not new:
                left.append(f"{getattr(owner, '__name__', type(owner).__name__)}.{name}")
            elif old is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, old)
        self._done.clear()
        return left


def loaded(name: str) -> ModuleType | None:
    """Return the module if it has been imported completely, without importing it."""
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    return None if getattr(spec, "_initializing", False) else module


class _Loader(importlib.abc.Loader):
    """Runs the real loader, then tells the watch."""

    def __init__(self, real: importlib.abc.Loader, done: Callable[[ModuleType], None]) -> None:
        self._real = real
        self._done = done

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._real.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = self._real
        module.__loader__ = self._real
        self._done(module)


class ImportWatch(importlib.abc.MetaPathFinder):
    """Calls functions when modules are there: at once, or as soon as the program imports them.

    Parameters
    ----------
    failed
        Called with the module's name and the exception if one of the functions raises.
    """

    def __init__(self, failed: Callable[[str, BaseException], None]) -> None:
        self._failed = failed
        self._waiting: dict[str, list[Callable[[ModuleType], None]]] = {}
        self._finding: set[str] = set()

    def when(self, name: str, fn: Callable[[ModuleType], None]) -> None:
        """Call ``fn(module)`` now if the module is loaded, else right after it has been."""
        module = loaded(name)
        if module is not None:
            self._call(name, fn, module)
            return
        self._waiting.setdefault(name, []).append(fn)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def stop(self) -> None:
        """Wait for nothing any more."""
        self._waiting.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find as the other finders do, with a loader that tells when it has run."""
        if fullname not in self._waiting or fullname in self._finding:
            return None
        self._finding.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._finding.discard(fullname)
        if spec is not None and spec.loader is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader, self._loaded)
        return spec

    def _loaded(self, module: ModuleType) -> None:
        for fn in self._waiting.pop(module.__name__, []):
            self._call(module.__name__, fn, module)
        if not self._waiting:
            self.stop()

    def _call(self, name: str, fn: Callable[[ModuleType], None], module: ModuleType) -> None:
        try:
            fn(module)
        except Exception as err:  # ours, not the program's import  # noqa: BLE001
            self._failed(name, err)
