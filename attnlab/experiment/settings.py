"""What language models of experiments on two cores share, and what the relatives of softmax want of the length."""

import math

from ml_collections import ConfigDict


def small_text(config: ConfigDict, *, steps: int, batch: int, length: int) -> None:
    """Makes an unlocked config of a language model, in place, one for two cores: two layers of 64 channels."""
    config.update(steps=steps, batch_size=batch, length=length)
    config.model.dim = 64
    config.model.stack.depth = 2


def for_length(config: ConfigDict, recipe: str) -> None:
    """Sets, in place, the constants of a recipe's attention that want the length `n` of training.

    That is `-log n` as the bias of sigmoids (Ramapuram et al. 2025), `-12 / n` as the lower end of clipped softmax
    (Bondarenko, Nagel and Blankevoort 2023), and `n` itself for scalable softmax (Nakanishi 2025).
    """
    mixer = config.model.stack.blocks[0].mixer
    if recipe == 'sigmoid_attention':
        mixer.weights.bias = -math.log(config.length)
    if recipe == 'clipped_softmax':
        mixer.weights.gamma = -12 / config.length
    if recipe.startswith('ssmax'):
        mixer.temperature.length = config.length
