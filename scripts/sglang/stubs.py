"""Stands in for modules that SGLang imports and a CPU never calls.

``torchvision`` and ``sgl_kernel`` are imported at the top of modules which a text model on a CPU loads but does not
use. Here they import, and so does any name in them; calling one raises. Only imports made by SGLang's own modules are
answered, so that others, transformers for one, find them missing and do without. One that is installed is left alone.

Loaded whenever the environment's Python starts, by a ``.pth`` file: see ``environment.py``.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

STUBBED = ("torchvision", "sgl_kernel")
ASKED_BY = "sglang"


class Missing:
    """Whatever was looked up in a stub: it has any attribute and may be a base class, but raises when it is called."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def __call__(self, *_args: object, **_named: object) -> object:
        """Refuse."""
        raise RuntimeError(f"{self.__name__} was called, but is a stub: its package is not installed")

    def __getattr__(self, name: str) -> Missing:
        return looked_up(self.__name__, name)

    def __mro_entries__(self, _bases: tuple[object, ...]) -> tuple[type, ...]:
        return (object,)


class Stub(ModuleType):
    """A module or package with every name in it."""

    def __getattr__(self, name: str) -> Missing:
        return looked_up(self.__name__, name)


def looked_up(owner: str, name: str) -> Missing:
    """The stand-in for a name in a stub.

    Raises:
        AttributeError: for ``__version__`` and the like, by which others tell what a module can do.
    """
    if name.startswith("__"):
        raise AttributeError(f"{owner} is a stub and has no {name}")
    return Missing(f"{owner}.{name}")


class StubFinder(MetaPathFinder, Loader):
    """Finds stubs for SGLang's modules."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """The stub where one is called for; see `importlib.abc.MetaPathFinder`."""
        del path, target
        if fullname.partition(".")[0] in STUBBED and importer().partition(".")[0] == ASKED_BY:
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """An empty module in which every name is found."""
        return Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: there is no code."""


def importer() -> str:
    """The name of the module whose import is under way: the innermost caller that is not the import system."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name != __name__ and not name.startswith("importlib"):
            return name
        frame = frame.f_back
    return ""


# Last, so that it is asked only for what is not installed.
sys.meta_path.append(StubFinder())
