"""As in `recall_by_state`: confirmed accuracy over bytes of state, a line a recipe; seeds are dots."""

import pathlib

from attnlab.experiment.experiment import module_of

figure = module_of(pathlib.Path(__file__).parents[1] / 'recall_by_state' / 'plot.py').figure
