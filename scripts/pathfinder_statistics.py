"""Statistics of Pathfinder's images: python scripts/pathfinder_statistics.py [COUNT [FOLDER]].

Of COUNT images as attnlab draws them and, given a folder of the released images (`imgs/0` and so on), of as many of
those: the mean over images with its standard error. What only the contents of an image tell is left out for those.
"""

import pathlib
import sys
import time

import numpy as np

from attnlab.data.long_range.pathfinder import Pathfinder

BANDS = ((1, 31), (32, 95), (96, 159), (160, 223), (224, 255))


def of_images(images: np.ndarray) -> dict[str, np.ndarray]:
    """What can be told of every image alone, `n h w`."""
    levels = images.reshape(len(images), -1)
    found = {'lit pixels': (levels > 0).mean(1), 'mean level': levels.mean(1)}
    return found | {
        f'pixels of level {low} to {high}': ((levels >= low) & (levels <= high)).mean(1) for low, high in BANDS
    }


def drawn(count: int) -> dict[str, np.ndarray]:
    """Of the images that attnlab draws."""
    of = Pathfinder()
    of.scene(np.random.SeedSequence(0))
    began = time.process_time()
    scenes = [of.scene(np.random.SeedSequence(0, spawn_key=(0, index))) for index in range(count)]
    images = np.stack([of.render(scene) for scene in scenes])
    print(f'{1e3 * (time.process_time() - began) / count:.2f} ms of processor time an image', file=sys.stderr)
    return {
        'short paths': np.array([len(scene.distractors) for scene in scenes]),
        'level of markers': np.array(
            [np.mean([image[place] for place in scene.markers]) for scene, image in zip(scenes, images, strict=True)]
        ),
        'share of label 1': np.array([scene.label for scene in scenes]),
    } | of_images(images)


def released(count: int, folder: pathlib.Path) -> dict[str, np.ndarray]:
    """Of images in a folder."""
    from PIL import Image

    paths = sorted(folder.rglob('*.png'))[:count]
    return of_images(np.stack([np.asarray(Image.open(path)) for path in paths]))


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 2_000
    tables = {'attnlab': drawn(count)}
    if len(sys.argv) > 2:
        tables['released'] = released(count, pathlib.Path(sys.argv[2]))
    for title, table in tables.items():
        print(f'{title}:')
        for name, values in table.items():
            print(f'  {name}: {values.mean():.5g} +- {values.std() / np.sqrt(len(values)):.2g}')


if __name__ == '__main__':
    main()
