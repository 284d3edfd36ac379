"""Times the input pipeline of the quickstart's config by itself: python scripts/bench_input.py"""

import time

from attnlab.data.pipeline import batches
from attnlab.tasks.language import LanguageModelling


def tokens_per_second(batch_size: int, length: int, count: int) -> float:
    with batches(LanguageModelling().source('train', length), batch_size=batch_size, seed=0) as feed:
        next(feed)
        start = time.perf_counter()
        for _ in range(count):
            next(feed)
        return count * batch_size * length / (time.perf_counter() - start)


for shape in ((16, 256), (8, 256), (8, 1024)):
    print(f'{shape[0]} x {shape[1]}: {tokens_per_second(*shape, count=2000) / 1e6:.2f} M tokens/s')
