"""As in `state_tracking`: the confirmed accuracy at six times the length trained on, a panel a problem."""

import pathlib

from attnlab.experiment.experiment import module_of

figure = module_of(pathlib.Path(__file__).parents[1] / 'state_tracking' / 'plot.py').figure
