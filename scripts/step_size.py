"""The transformer that the step benchmark trains; imported by both sides, so it needs the standard library only."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class StepSize:
    depth: int = 6
    dim: int = 256
    heads: int = 4
    mlp_dim: int = 704  # the multiple of 64 nearest to 8/3 of `dim`
    vocab: int = 256
    length: int = 256
    batch: int = 8
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    norm_eps: float = 1e-6
    rope_base: float = 10_000.0

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def tokens(self) -> int:
        return self.batch * self.length
