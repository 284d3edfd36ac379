"""Names that saved configs may still hold, and what each is called now.

A work directory or a study names classes and functions by import path, and their arguments by name. When one moves, its
old path is listed here; when its arguments change, so is how those saved before are written now. What was made before
still loads.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

Fields = Mapping[str, Any]
"""A saved spec: its `target` and its arguments, specs inside them upgraded already and held as mappings."""

MODULES = MappingProxyType(
    {
        'attnlab.data.builders': 'attnlab.data.text.builders',
        'attnlab.data.corpus': 'attnlab.data.text.corpus',
        'attnlab.data.stdlib': 'attnlab.data.text.stdlib',
        'attnlab.data.text': 'attnlab.data.text.text',
        'attnlab.data.tfds': 'attnlab.data.text.tfds',
        'attnlab.data.tokenizers': 'attnlab.data.text.tokenizers',
        'attnlab.data.windows': 'attnlab.data.text.windows',
        'attnlab.mixers.attention': 'attnlab.mixers.softmax.attention',
        'attnlab.mixers.convolution': 'attnlab.mixers.convolution.gated',
        'attnlab.mixers.diagonal': 'attnlab.mixers.recurrent.diagonal',
        'attnlab.mixers.differential': 'attnlab.mixers.softmax.differential',
        'attnlab.mixers.latent': 'attnlab.mixers.softmax.latent',
        'attnlab.mixers.linear_attention': 'attnlab.mixers.linear.attention',
        'attnlab.mixers.routed': 'attnlab.mixers.softmax.routed',
        'attnlab.mixers.selective': 'attnlab.mixers.state_space.selective',
        'attnlab.mixers.selective_attention': 'attnlab.mixers.softmax.selective',
        'attnlab.mixers.softmax_only': 'attnlab.blocks.softmax_only',
        'attnlab.mixers.third_order': 'attnlab.mixers.softmax.third_order',
        'attnlab.mixers.unified': 'attnlab.blocks.unified',
        'attnlab.models.block': 'attnlab.blocks.block',
        'attnlab.nn.embed': 'attnlab.models.inputs.embedding',
    }
)
"""Modules that moved."""

OBJECTS: MappingProxyType[str, str] = MappingProxyType({})
"""Classes and functions that were renamed or moved alone, by the path that they would have in `MODULES`."""

UPGRADES: MappingProxyType[str, Callable[[Fields], Fields]] = MappingProxyType({})
"""How specs saved with arguments that are gone are written now, by today's path of their target.

An upgrade is also handed specs that need none, and returns those as they are.
"""


def current(path: str) -> str:
    """The import path of today for one that was saved at any time; a path that never changed is returned as it is."""
    module, _, name = path.rpartition('.')
    path = f'{MODULES.get(module, module)}.{name}'
    return OBJECTS.get(path, path)


def upgraded(fields: Fields) -> Fields:
    """The fields of a spec that was saved at any time, with the names and the arguments of today."""
    target = current(fields['target'])
    fields = {**fields, 'target': target}
    return UPGRADES[target](fields) if target in UPGRADES else fields
