"""Makes attnlab/quantize/gaussian_grids.npz: grids of points near to a standard Gaussian in 2 and 4 dimensions.

    python scripts/gaussian_grids.py attnlab/quantize/gaussian_grids.npz

Lloyd's method on Sobol points, from three starts of the density that grids tend to (a Gaussian of variance
`(p + 2) / p`), the best of which goes on with more points. Where it ends depends on last bits: the file is what counts.
"""

import sys
from typing import Any

import numpy as np
from scipy.spatial import cKDTree
from scipy.special import ndtri
from scipy.stats import qmc

GRIDS = ((2, 2), (2, 3), (2, 4), (4, 2))


def gaussian(power: int, dimension: int, seed: int) -> np.ndarray:
    """`2^power` points of a standard Gaussian."""
    return ndtri(qmc.Sobol(dimension, rng=np.random.default_rng(seed)).random_base2(power))


def lloyd(points: np.ndarray, x: np.ndarray, steps: int, least: float) -> tuple[np.ndarray, float]:
    """The points moved to the means of what is nearest to them, until the error falls by less than a share."""
    error = np.inf
    for step in range(steps):
        distances, near = cKDTree(points).query(x)
        before, error = error, float(np.mean(distances**2) / x.shape[1])
        if step > 20 and before - error < least * error:
            break
        counts = np.bincount(near, minlength=len(points))[:, None]
        sums = np.stack([np.bincount(near, column, len(points)) for column in x.T], axis=1)
        points = np.where(counts > 0, sums / np.maximum(counts, 1), points)
    return points, error


def main() -> None:
    """Writes the file that is named, and prints the mean squared error of each grid on points of another draw."""
    made: dict[str, Any] = {}
    for dimension, bits in GRIDS:
        starts = [
            np.sqrt((dimension + 2) / dimension) * gaussian(dimension * bits, dimension, 100 + seed)
            for seed in range(3)
        ]
        tried = [lloyd(start, gaussian(15, dimension, 1), 200, 1e-5) for start in starts]
        points, _ = lloyd(min(tried, key=lambda each: each[1])[0], gaussian(17, dimension, 2), 80, 1e-6)
        made[f'{dimension}x{bits}'] = points.astype(np.float32)
        error = np.mean(cKDTree(points).query(gaussian(17, dimension, 3))[0] ** 2) / dimension
        print(f'{dimension}x{bits}: {len(points)} points, {error:.5f}', flush=True)
    np.savez(sys.argv[1], **made)


if __name__ == '__main__':
    main()
