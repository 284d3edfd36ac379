"""First checks: the device, its compiler, its rates, one kernel of each core."""

import pathlib
import shutil
import subprocess
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import target
from pallas_kernels.bench import ceilings, timing
from scripts.session.cases import CORES, SMOKE, Case
from scripts.session.stages import correct


def cases(small: bool) -> list[Case]:
    """The smoke product, tools and rates, and for each core the first case in bfloat16 that its kernel serves."""
    found = [SMOKE, Case('check/tools', 'check', 20)]
    if small:
        return found
    found.append(Case('check/ceilings', 'check', 60))
    return found + [correct.first(core, stage='check') for core in CORES]


def run(case: Case, folder: pathlib.Path) -> dict[str, Any]:
    if case.id in CHECKS:
        return CHECKS[case.id]()
    return correct.run(case, folder)


def smoke() -> dict[str, Any]:
    """A product of matrices."""
    found = float(jnp.sum(jnp.ones((256, 256), jnp.bfloat16) @ jnp.ones((256, 256), jnp.bfloat16)))
    facts = {'device': jax.devices()[0].device_kind, 'platform': target.current().platform}
    return {'status': 'ok' if found == 256**3 else 'wrong', 'facts': facts}


def tools() -> dict[str, Any]:
    """The assembler that Mosaic calls, and the driver."""
    found = {name: _output(name, flag) for name, flag in (('ptxas', '--version'), ('nvidia-smi', '--version'))}
    if target.current().platform == 'gpu' and found['ptxas'] is None:
        return {'status': 'failed', 'reason': 'there is no ptxas on PATH', 'tools': found}
    return {'status': 'ok', 'tools': found}


def rates() -> dict[str, Any]:
    """The rates of a copy, of a product and of exponentials, which figures are compared with."""
    top = ceilings.measure(target.current().platform, jnp.dtype(jnp.bfloat16), timing.Patience(3))
    figures = {
        'copy, GB/s': top.bytes_per_second / 1e9,
        'matrix product, TFLOP/s': top.flops_per_second / 1e12,
        'exponentials, G/s': top.exponentials_per_second / 1e9,
    }
    return {'status': 'ok', 'ceilings': figures}


CHECKS = {SMOKE.id: smoke, 'check/tools': tools, 'check/ceilings': rates}


def _output(name: str, flag: str) -> str | None:
    path = shutil.which(name)
    if path is None:
        return None
    answer = subprocess.run([path, flag], capture_output=True, text=True, timeout=10, check=False)
    return (answer.stdout.strip().splitlines() or [''])[-1]
