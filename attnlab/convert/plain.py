"""Which parts attention has beside those that conversions can represent."""

from attnlab.mixers.softmax.attention import Attention
from attnlab.nn.positions import Rope
from pallas_kernels import Softmax


def other_parts(mixer: Attention) -> list[str]:
    """Returns the arguments of attention that make it more than a softmax of rotated projections over all keys."""
    present = {
        'prelude': bool(mixer.preludes),
        'shift': bool(mixer.shifts),
        'qk_norm': mixer.query_norm is not None,
        'position': not isinstance(mixer.position, Rope | None),
        'weights': mixer.weights != Softmax(),
        'temperature': mixer.temperature is not None,
        'forget': mixer.forget is not None,
        'sink': mixer.sink is not None,
        'window': mixer.reach.window is not None,
        'sinks': mixer.reach.sinks > 0,
        'norm': mixer.norm is not None,
        'gate': mixer.gate is not None,
    }
    return [name for name, there in present.items() if there]
