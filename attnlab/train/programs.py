"""A cache of compiled programs, shared by runs."""

import collections
import gc
import json
from typing import Any

from ml_collections import ConfigDict

from attnlab.config import plain
from attnlab.errors import UserError
from attnlab.train import launch
from attnlab.train.setup import SCALARS, Setup, prepare

KEPT = 2
"""The number of models whose compiled programs are cached."""


class Unbuildable(Exception):
    """A config that cannot be built; the message gives the reason."""


class Programs:
    """Compiled programs by the config keys they depend on: trials that differ only in `SCALARS` share them."""

    def __init__(self) -> None:
        self._made: collections.OrderedDict[str, tuple[Setup, dict[str, Any]]] = collections.OrderedDict()

    def prepare(self, config: ConfigDict) -> tuple[Setup, dict[str, Any]]:
        """The setup of a run, and the facts of `run_facts`. Raises Unbuildable for a config that cannot be built."""
        try:
            setup = prepare(config).begun()
            setup.check()
        except UserError as error:
            raise Unbuildable(str(error)) from error
        setup.load_data()
        key = structure(config)
        if key in self._made:
            self._made.move_to_end(key)
            first, facts = self._made[key]
            return setup.sharing(first), facts
        while len(self._made) >= KEPT:
            self._made.popitem(last=False)
        try:
            facts = launch.run_facts(setup)
        except UserError as error:
            raise Unbuildable(str(error)) from error
        self._made[key] = setup, facts
        return setup, facts

    def clear(self) -> None:
        """Drops all programs, when memory may have run out."""
        self._made.clear()
        gc.collect()


def structure(config: ConfigDict) -> str:
    """A config without the keys that its programs take as arguments."""
    rest: Any = plain(config)
    for key in SCALARS:
        *parents, name = key.split('.')
        inner = rest
        for parent in parents:
            inner = inner[parent]
        del inner[name]
    return json.dumps(rest, sort_keys=True)
