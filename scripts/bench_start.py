"""Times the quickstart's command to its first finished step, cold and with a warm compilation cache."""

import pathlib
import subprocess
import sys
import tempfile
import time


def seconds_to_first_step(workdir: pathlib.Path, cache: pathlib.Path) -> float:
    arguments = ['--config=language', '--config.report.every=1', f'--workdir={workdir}']
    command = [sys.executable, '-m', 'attnlab', 'train', *arguments, f'--compilation_cache={cache}']
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while not (workdir / 'metrics.jsonl').exists():
            if process.poll() is not None:
                raise RuntimeError(f'the run ended with status {process.returncode} before its first step')
            time.sleep(0.05)
        seconds = time.perf_counter() - start
        process.kill()
    return seconds


with tempfile.TemporaryDirectory() as folder:
    for name in ('cold', 'compiled before'):
        seconds = seconds_to_first_step(pathlib.Path(folder, name), pathlib.Path(folder, 'cache'))
        print(f'{name}: {seconds:.1f} s from the command to the end of the first step')
