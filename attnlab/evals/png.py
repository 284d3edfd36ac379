"""Images as bytes, and as files."""

import pathlib

import numpy as np
from jaxtyping import Float, UInt8

from attnlab.files import replacing


def as_bytes(pixels: Float[np.ndarray, '*n'], highest: float) -> UInt8[np.ndarray, '*n']:
    """Pixels from black at 0 to white at `highest`, or at 1 where that is more."""
    return np.clip(np.round(pixels * 255 / max(highest, 1.0)), 0, 255).astype(np.uint8)


def write_png(picture: UInt8[np.ndarray, 'y x *c'], path: pathlib.Path) -> None:
    """Writes a picture, of three channels or none."""
    from PIL import Image

    with replacing(path) as temporary:
        Image.fromarray(picture).save(temporary, format='PNG')
