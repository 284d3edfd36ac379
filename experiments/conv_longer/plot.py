"""As in `conv_for_all_or_none`: confirmed accuracy of every mixer without and with convolutions, seed by seed."""

import pathlib

from attnlab.experiment.experiment import module_of

figure = module_of(pathlib.Path(__file__).parents[1] / 'conv_for_all_or_none' / 'plot.py').figure
