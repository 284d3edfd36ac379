import dataclasses
import functools
import json

import pytest
from flax import nnx
from ml_collections import ConfigDict

from attnlab import config
from attnlab.config import Factory, apart, arguments, build, check_keys, spec, takes, whole
from attnlab.errors import UserError


@dataclasses.dataclass(frozen=True)
class Part:
    rate: float = 1
    names: tuple[str, ...] = ('a', 'b')
    width: int | None = None


class Leaf(nnx.Module):
    def __init__(self, dim: int, *, rank: int = 2, rngs: nnx.Rngs):
        self.dim, self.rank = dim, rank


class Tree(nnx.Module):
    def __init__(self, dim: int, *, heads: int, part: Part = Part(), leaf=Leaf, leaves: tuple = (), rngs: nnx.Rngs):
        self.part, self.leaf, self.leaves = part, leaf(dim, rngs=rngs), len(leaves)


def test_a_spec_spells_out_the_remaining_defaults_and_leaves_out_what_the_parent_gives():
    assert config.plain(spec(Tree, heads=4)) == {
        'target': f'{__name__}.Tree',
        'heads': 4,
        'part': {'target': f'{__name__}.Part', 'rate': 1.0, 'names': ['a', 'b'], 'width': None},
        'leaf': {'target': f'{__name__}.Leaf', 'rank': 2},
        'leaves': [],
    }


def test_build_makes_objects_of_dataclasses_and_factories_of_modules():
    assert build(spec(Part, rate=0.5)) == Part(0.5)
    factory = build(spec(Tree, heads=4, leaf=spec(Leaf, rank=7), leaves=(spec(Leaf),)))
    assert isinstance(factory, Factory)
    tree = factory(8, rngs=nnx.Rngs(0))
    assert (tree.leaf.dim, tree.leaf.rank, tree.leaves, tree.part) == (8, 7, 1, Part(1.0))


def test_a_config_survives_json(tmp_path):
    original = ConfigDict({'tree': spec(Tree, heads=4, leaves=(spec(Leaf),)), 'pair': (1, 2.5)}, convert_dict=False)
    config.save(original, tmp_path / 'config.json')
    loaded = config.load(tmp_path / 'config.json')
    assert config.plain(loaded) == config.plain(original) == json.loads((tmp_path / 'config.json').read_text())
    assert build(loaded) == build(original)


def test_unknown_arguments_name_the_nearest():
    with pytest.raises(UserError, match=r"no argument 'head'; did you mean 'heads'"):
        spec(Tree, head=4)
    wrong = spec(Part)
    wrong.rat = 3
    with pytest.raises(UserError, match=r"config takes no argument 'rat'; did you mean 'rate'"):
        build(wrong)


def test_top_level_keys_that_are_misspelt_or_missing_are_named():
    check_keys(ConfigDict({'steps': 1}), {'steps'}, {'start'}, 'a run config')
    with pytest.raises(UserError, match=r"^a run config has no key 'stpes'; did you mean 'steps'\?$"):
        check_keys(ConfigDict({'stpes': 1}), {'steps', 'seed'}, {'start'}, 'a run config')
    with pytest.raises(UserError, match=r'^a run config lacks seed, steps$'):
        check_keys(ConfigDict({'start': 1}), {'steps', 'seed'}, {'start'}, 'a run config')


@pytest.mark.parametrize(
    ('name', 'value', 'message'),
    [
        ('rate', 'fast', r"config.rate is 'fast', of type str; it must be float"),
        ('width', 2.5, r'config.width is 2.5, of type float; it must be int or None'),
        ('rate', True, r'config.rate is True, of type bool; it must be float'),
    ],
)
def test_a_wrong_type_names_the_key_what_it_has_and_what_it_wants(name, value, message):
    wrong = ConfigDict(config.plain(spec(Part)) | {name: value}, convert_dict=False)
    with pytest.raises(UserError, match=message):
        build(wrong)


def test_a_missing_argument_and_an_unknown_target_say_where():
    with pytest.raises(UserError, match=r'config.x \(.*FromRun\) lacks run'):
        build(ConfigDict({'target': 'attnlab.train.start.FromRun'}), 'config.x')
    with pytest.raises(UserError, match=r"config.target is 'attnlab.nothing.X', which cannot be imported"):
        build(ConfigDict({'target': 'attnlab.nothing.X'}))


def test_takes_reads_the_constructor():
    assert takes(spec(Leaf)) == {'dim', 'rank'}


def test_arguments():
    assert arguments('zoo=gla,size=tiny', zoo='mha', size='10m', data='x') == {
        'zoo': 'gla',
        'size': 'tiny',
        'data': 'x',
    }
    with pytest.raises(UserError, match=r"takes no argument 'zo'; did you mean 'zoo'"):
        arguments('zo=gla', zoo='mha')
    with pytest.raises(UserError, match="'zoo=gla,zoo=mha' has zoo twice, 'gla' and 'mha'; once is enough"):
        arguments('zoo=gla,zoo=mha', zoo='mha')


def test_arguments_of_two_configs_are_told_apart():
    assert apart('zoo=gla,seeds=2,size=tiny', seeds='1') == ({'seeds': '2'}, 'zoo=gla,size=tiny')
    assert apart('zoo=gla', seeds='1') == ({'seeds': '1'}, 'zoo=gla')
    with pytest.raises(UserError, match="'seeds' in the config argument 'seeds' is not name=value"):
        apart('seeds,zoo=gla', seeds='1')


def test_whole_numbers():
    assert whole('side', '1') == 1 and whole('side', '0', least=0) == 0
    for text, least in (('0', 1), ('-1', 0), ('1.0', 1), ('²', 1), ('٣', 1), ('', 0)):
        with pytest.raises(UserError, match=f"side is '{text}'; it must be a whole number from {least}"):
            whole('side', text, least)


OF_A_RUN = {'task': {'target': 'a.B'}, 'model': {}, 'optimizer': {}, 'evals': []}


@pytest.mark.parametrize(
    ('content', 'said'),
    [
        (OF_A_RUN | {'task': 1}, 'TypeError'),
        (OF_A_RUN | {'task': {}}, "KeyError: 'target'"),
        (OF_A_RUN | {'model': {'head': 3}}, 'TypeError'),
        ({'a.b': 1}, 'ValueError'),
        ({'mixer': {'target': 'attnlab.mixers.softmax.attention.Attention', 'penalty': {}}}, "KeyError: 'weights'"),
        (functools.reduce(lambda inner, _: {'a': inner}, range(400), {}), 'RecursionError'),
    ],
)
def test_what_no_config_could_be_is_damaged(tmp_path, content, said):
    path = tmp_path / 'config.json'
    path.write_text(json.dumps(content))
    with pytest.raises(UserError) as caught:
        config.load(path)
    assert f'{path} is damaged: {said}' in str(caught.value) and 'put back a copy of it' in str(caught.value)
