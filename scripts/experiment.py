"""Runs one of the experiments, or goes on with it: scripts/experiment.py NAME [--size=full]."""

import argparse
import os
import pathlib
import sys

from rich.console import Console

from attnlab.errors import UserError
from attnlab.experiment.experiment import Experiment
from attnlab.experiment.runs import report_experiment, run_experiment
from attnlab.train import devices

EXPERIMENTS = pathlib.Path(__file__).resolve().parents[1] / 'experiments'

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument('name', nargs='?', default='NAME', help='a folder of experiments')
parser.add_argument('--size', default='cpu', help='cpu or full')
parser.add_argument('--workdirs', default='runs/experiments', type=pathlib.Path, help='where the runs are kept')
parser.add_argument('--report', action='store_true', help='run nothing, report what has been measured')
parser.add_argument('--workers', type=int, help='of sweeps, trials at once; at size cpu as many as there are cores')
chosen = parser.parse_args()
console = Console(highlight=False, soft_wrap=True)
try:
    experiment = Experiment(EXPERIMENTS / chosen.name, chosen.size)
    command = f'scripts/experiment.py {chosen.name} --size={chosen.size}'
    if not experiment.has_studies():
        devices.start(compilation_cache='~/.cache/attnlab/compiled')
        go = report_experiment if chosen.report else run_experiment
        go(experiment, chosen.workdirs, command, console)
    else:
        from attnlab.experiment.studies import report_studies, run_studies

        if chosen.report:
            report_studies(experiment, chosen.workdirs, command, console)
        else:
            workers = chosen.workers or (os.cpu_count() or 1 if chosen.size == 'cpu' else 1)
            run_studies(experiment, chosen.workdirs, command, workers, console)
except UserError as error:
    sys.exit(f'experiment: {error}')
