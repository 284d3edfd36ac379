"""The README's mixer is run as it stands there."""

import pathlib
import re

README = pathlib.Path(__file__).parents[1] / 'README.md'


def test_the_mixer_of_the_readme_keeps_the_contract():
    definition, check = re.findall(r'```python\n(.*?)```', README.read_text(), flags=re.DOTALL)
    assert len([line for line in definition.partition('class MovingAverage')[2].splitlines() if line.strip()]) <= 30
    exec(definition + check, {'__name__': 'readme'})
