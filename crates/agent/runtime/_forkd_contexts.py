"""Namespaces of evaluated Python, each with a working directory, and variables of one cell.

A part of `python.py`, which the agent puts beside it.

Only the standard library, Python 3.8 and later.
"""

import os
import sys
import types

CONTEXTS_MAX = 64
"""Contexts beside that of the warm-up."""

ENVIRON = os.environb
"""The environment, whatever code makes of the name."""


class Context:
    """A namespace with a working directory.

    Attributes:
        module: The `__main__` of what runs in it: pickles and dataclasses look it up by name.
        folder: Where the next code starts; None for where the last code has left it.
    """

    def __init__(self, folder=None):
        self.module = types.ModuleType("__main__")
        self.module.__dict__["__builtins__"] = __builtins__
        self.folder = folder

    @property
    def namespace(self):
        """The names of its top level."""
        return self.module.__dict__

    def enter(self, left):
        """Leave another context for this one."""
        left.folder = folder_of(os.getcwd)
        sys.modules["__main__"] = self.module
        if self.folder is not None:
            folder_of(lambda: os.chdir(self.folder))


class Variables:
    """Variables of the environment that are there for a block; then they are as before it."""

    def __init__(self, given):
        self._given = {name.encode(): value.encode() for name, value in given.items()}
        self._before = {name: ENVIRON.get(name) for name in self._given}

    def __enter__(self):
        ENVIRON.update(self._given)

    def __exit__(self, *_):
        for name, value in self._before.items():
            if value is not None:
                ENVIRON[name] = value
            else:
                ENVIRON.pop(name, None)


def folder_of(call):
    """Return what a call gives; None if the folder is gone."""
    try:
        return call()
    except OSError:
        return None
