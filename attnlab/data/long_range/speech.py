"""Speech Commands as raw audio: which of 35 words is spoken."""

import io
import pathlib
import re
import wave
from collections.abc import Iterator

import numpy as np

from attnlab.data.archives import tar_members
from attnlab.data.long_range.dataset import Example, Kind
from attnlab.errors import UserError

# fmt: off
WORDS = (
    'backward', 'bed', 'bird', 'cat', 'dog', 'down', 'eight', 'five', 'follow', 'forward', 'four', 'go', 'happy',
    'house', 'learn', 'left', 'marvin', 'nine', 'no', 'off', 'on', 'one', 'right', 'seven', 'sheila', 'six', 'stop',
    'three', 'tree', 'two', 'up', 'visual', 'wow', 'yes', 'zero',
)
# fmt: on
"""The words by label."""

SPEECH_COMMANDS = Kind(classes=len(WORDS), length=16_000, deviation=2.0**15)
"""A second at 16 kHz, between -1 and 1; Warden 2018, https://arxiv.org/abs/1804.03209."""

LISTS = {'validation_list.txt': 'validation', 'testing_list.txt': 'test'}


def speech_commands(archive: pathlib.Path, split: str) -> Iterator[Example]:
    """The recordings of `train`, `validation` or `test`, as divided by the archive's own lists, in its order."""
    listed: dict[str, str] = {}
    for path, content in tar_members(archive, re.compile(r'(\./)?(validation|testing)_list\.txt')):
        listed |= {line.decode(): LISTS[path.name] for line in content.read().split()}
    if not listed:
        raise UserError(f'{archive} has no validation_list.txt and no testing_list.txt')
    for path, content in tar_members(archive, re.compile(rf'(\./)?({"|".join(WORDS)})/[^/]*\.wav')):
        word, name = path.parts[-2:]
        found = listed.get(f'{word}/{name}', 'train')
        if found == split:
            with wave.open(io.BytesIO(content.read())) as recording:
                if (recording.getnchannels(), recording.getsampwidth(), recording.getframerate()) != (1, 2, 16_000):
                    raise UserError(f'{path} in {archive} is not 16 kHz, 16 bits, one channel')
                samples = np.frombuffer(recording.readframes(recording.getnframes()), '<i2')
            yield {'x': samples.astype(np.int16), 'label': np.int32(WORDS.index(word))}
