"""Strict mode: what would pass unnoticed in a run is an error here, and shapes are checked against the annotations.

Warnings are errors too: see `filterwarnings` in setup.cfg.
"""

import jax
import jaxtyping

# Before anything imports attnlab, so that every annotated function of it is checked.
jaxtyping.install_import_hook('attnlab', 'beartype.beartype')

jax.config.update('jax_num_cpu_devices', 2)
jax.config.update('jax_numpy_rank_promotion', 'raise')
