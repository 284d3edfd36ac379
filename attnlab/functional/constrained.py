"""Drawing a token among those that a constraint allows, with the weight that makes up for it."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.special import log_softmax, logsumexp

from attnlab.errors import UserError
from attnlab.functional.sampling import UNRESTRICTED, Sampling
from attnlab.signature import checked_fields

Allowed = Callable[[Int[np.ndarray, 'n']], Bool[np.ndarray, 'n']]
"""Which of some tokens may come next."""


class Drawn(NamedTuple):
    """A token that was drawn.

    Attributes:
      token: what was drawn; it is allowed.
      log_weight: log of a number `w` with `E[w 1(token = v)] = p_v` for each `v` that may be drawn, in nats.
      tested: of how many tokens it was asked whether they are allowed.
    """

    token: int
    log_weight: float
    tested: int


@runtime_checkable
class Choice(Protocol):
    """A way to draw an allowed token."""

    def draw(self, logits: Float[np.ndarray, 'o'], allowed: Allowed, rng: np.random.Generator) -> Drawn:
        """Draws a token; raises `NothingAllowed` where none is allowed."""


@checked_fields
@dataclasses.dataclass(frozen=True)
class Masked:
    """Draws from `p` restricted to what is allowed, of which all is tested.

        q_v = p_v c_v / Z,  w = Z = sum_v p_v c_v,  p = softmax(logits / temperature)

    Attributes:
      sampling: from which of the allowed tokens is drawn; `Z` is the probability of those. At temperature 0, which
        draws nothing, it is that of the token at temperature 1.
    """

    sampling: Sampling = UNRESTRICTED

    def draw(self, logits: Float[np.ndarray, 'o'], allowed: Allowed, rng: np.random.Generator) -> Drawn:
        """Draws a token; raises `NothingAllowed` where none is allowed."""
        may = allowed(np.arange(len(logits)))
        if not may.any():
            raise NothingAllowed(NONE)
        kept = np.asarray(self.sampling.restricted(jnp.asarray(np.where(may, logits, -np.inf)[None], jnp.float32))[0])
        among = np.where(np.isfinite(kept), kept.astype(np.float64), -np.inf)
        token = int(np.argmax(among + rng.gumbel(size=len(among))))
        own = log_softmax(logits.astype(np.float64) / (self.sampling.temperature or 1.0))
        return Drawn(token, float(logsumexp(own[np.isfinite(kept)])), len(logits))


@checked_fields
@dataclasses.dataclass(frozen=True)
class Rejected:
    """Draws from the same distribution by adaptive weighted rejection sampling, which tests what it draws.

    Tokens are drawn from `p = softmax(logits / temperature)`, those that are rejected not again; the first that is
    allowed is taken. Drawing goes on to a second that is allowed. Had rejected tokens been drawn again, `R` draws
    would have been rejected by then, where of each wait for a token not yet rejected the repeats are drawn from their
    geometric distribution, and

        w = 1 / (1 + R),  E[w 1(token = v)] = p_v c_v,

    the estimate of an inverse binomial sample of two. Lipkin et al. 2025, https://arxiv.org/abs/2504.05410.

    Raises `UserError` for a temperature that is not above 0.
    """

    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise UserError(f'temperature is {self.temperature}; rejection needs one above 0, since it draws')

    def draw(self, logits: Float[np.ndarray, 'o'], allowed: Allowed, rng: np.random.Generator) -> Drawn:
        """Draws a token; raises `NothingAllowed` where none is allowed."""
        own = log_softmax(logits.astype(np.float64) / self.temperature)
        rejected, rejections = np.zeros(len(own), bool), 0.0
        accepted: list[int] = []
        while len(accepted) < 2:
            # The order of Gumbel's trick is that of drawing without putting back.
            order = np.argsort(-(own + rng.gumbel(size=len(own))))
            order = order[~rejected[order]]
            # The probability of all that is not rejected, before each draw: summed from its own end, it keeps its bits.
            rest = np.cumsum(np.exp(own[order])[::-1])[::-1]
            for token, left in zip(map(int, order), map(float, rest), strict=True):
                rejections += _repeats(left, rng)
                if token in accepted or allowed(np.array([token]))[0]:
                    accepted.append(token)
                    break
                rejected[token] = True
                rejections += 1.0
            else:
                raise NothingAllowed(NONE)
        tested = int(np.sum(rejected)) + len(set(accepted))
        return Drawn(accepted[0], float(-np.log1p(rejections)), tested)


NONE = 'no token is allowed here, so the text cannot go on'
"""What is said where a constraint leaves nothing."""


class NothingAllowed(UserError):
    """A constraint leaves no token: the text is whole, or it cannot be ended."""


def _repeats(left: float, rng: np.random.Generator) -> float:
    """How many draws fall on rejected tokens before one falls on the others, whose probability is `left`."""
    if left >= 1.0:
        return 0.0
    return float(np.floor(np.log1p(-rng.random()) / np.log1p(-left))) if left > 0 else np.inf
