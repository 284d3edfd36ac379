"""Which code MKL, the library of matrix products that PyTorch has on a CPU, runs on this processor."""

import os
import re
import subprocess

GENERIC = 'Intel(R) Architecture processors'
"""What MKL says of processors for which it has nothing better, as it does of many that are not Intel's."""

_SAID = re.compile(
    r'^MKL_VERBOSE .*? for Intel\(R\) 64 architecture (?P<path>.*?)(?: enabled processors)?, (?:Lnx|Win|OSX)', re.M
)
_PRODUCT = 'import torch; x = torch.ones(256, 256); x @ x'


def read(said: str) -> str | None:
    """The path named by what MKL says with MKL_VERBOSE=1, such as `AVX-512` or `generic`; `None` where it says none.

    The shortest name is taken, that in the last parentheses, where there is one.
    """
    found = _SAID.search(said)
    if found is None:
        return None
    path = found['path']
    if path == GENERIC:
        return 'generic'
    short = re.findall(r'\(Intel\(R\) ([^()]+)\)', path)
    return short[-1] if short else path.removeprefix('Intel(R) ')


def ask(python: str) -> str | None:
    """The path that a matrix product takes in an environment with torch; `None` where its torch has no MKL."""
    environment = os.environ | {'MKL_VERBOSE': '1'}
    done = subprocess.run([python, '-c', _PRODUCT], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f'{python} cannot multiply with torch: {done.stderr.strip()[-300:]}')
    return read(done.stdout)
