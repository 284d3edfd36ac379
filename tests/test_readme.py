"""The README's Python is run as it stands there."""

import pathlib
import re
import textwrap

README = pathlib.Path(__file__).parents[1] / 'README.md'


def test_the_mixer_of_the_readme_keeps_the_contract():
    definition, check = re.findall(r'```python\n(.*?)```', README.read_text(), flags=re.DOTALL)
    assert len([line for line in definition.partition('class MovingAverage')[2].splitlines() if line.strip()]) <= 30
    assert 'pallas_kernels' not in definition  # no compiler divides a kernel over devices; `cores` does
    exec(definition + check, {'__name__': 'readme'})


def test_the_mixer_that_the_readme_makes_is_called():
    [made] = re.findall(r'^    import attnlab\n(?:(?:    .*)?\n)*', README.read_text(), flags=re.MULTILINE)
    exec(textwrap.dedent(made), names := {'__name__': 'readme'})
    assert names['y'].shape == (2, 128, 256)
