"""Runs one of the experiments, or goes on with it: scripts/experiment.py NAME [--size=full]."""

import argparse
import pathlib
import sys

from rich.console import Console

from attnlab.analysis.experiment import Experiment, report_experiment, run_experiment
from attnlab.errors import UserError
from attnlab.train import devices

EXPERIMENTS = pathlib.Path(__file__).resolve().parents[1] / 'experiments'

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument('name', nargs='?', default='NAME', help='a folder of experiments')
parser.add_argument('--size', default='cpu', help='cpu or full')
parser.add_argument('--workdirs', default='runs/experiments', type=pathlib.Path, help='where the runs are kept')
parser.add_argument('--report', action='store_true', help='run nothing, report what has been measured')
chosen = parser.parse_args()
try:
    experiment = Experiment(EXPERIMENTS / chosen.name, chosen.size)
    devices.start(compilation_cache='~/.cache/attnlab/compiled')
    command = f'scripts/experiment.py {chosen.name} --size={chosen.size}'
    go = report_experiment if chosen.report else run_experiment
    go(experiment, chosen.workdirs, command, Console(highlight=False, soft_wrap=True))
except UserError as error:
    sys.exit(f'experiment: {error}')
