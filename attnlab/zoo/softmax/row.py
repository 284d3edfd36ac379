"""The row of a recipe that is multi-head attention with other parts."""

from typing import Any

from attnlab.config import spec
from attnlab.mixers.softmax.attention import Attention
from attnlab.nn.positions import Rope
from attnlab.zoo.recipe import Recipe, Start


def attention_with(
    cite: str, notes: str = '', *, claims: dict[str, Any] | None = None, start: Start | None = None, **parts: Any
) -> Recipe:
    """Multi-head attention with rotary positions and these parts."""
    everything = {'causal': True, 'bidirectional': True, 'streaming': True, 'packed': True, 'sequence': True}
    return Recipe(
        spec=spec(Attention, **{'position': Rope(), **parts}),
        cite=cite,
        notes=notes,
        start=start,
        **(everything | (claims or {})),
    )
