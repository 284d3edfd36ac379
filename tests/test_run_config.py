"""What a config's arguments choose by name, and what stays."""

import dataclasses

import pytest

from attnlab.config import build, plain
from attnlab.errors import UserError
from attnlab.run_config import OPTIMIZERS, SCHEDULES, chosen
from attnlab.train.optimizer import AdamW, Group, Groups, Lion, Muon
from attnlab.train.schedule import Cosine, LinearDecay
from attnlab.train.setup import prepare
from configs import grokking, language, long_range, recall

DEFAULT = AdamW(
    peak_lr=1e-2,
    schedule=Cosine(warmup=0.05, final=0.3),
    weight_decay=0.2,
    clip=None,
    groups=Groups(dynamics=Group(lr=0.5)),
    b1=0.8,
    b2=0.98,
    eps=1e-6,
)


def test_nothing_chosen_or_what_there_is_changes_nothing():
    assert chosen(DEFAULT, '', '') is DEFAULT
    assert chosen(DEFAULT, 'adamw', 'cosine') is DEFAULT


def test_an_optimizer_takes_over_what_all_have():
    found = chosen(DEFAULT, 'lion', 'linear')
    expected = Lion(peak_lr=2e-3, schedule=LinearDecay(warmup=0.05), weight_decay=1.0, clip=None, groups=DEFAULT.groups)
    assert dataclasses.replace(found, peak_lr=2e-3) == expected and found.peak_lr == pytest.approx(2e-3)
    muon = chosen(DEFAULT, 'muon', '')
    assert muon == Muon(**{field.name: getattr(DEFAULT, field.name) for field in dataclasses.fields(AdamW)})
    assert (muon.b1, muon.b2, muon.eps, muon.momentum) == (0.8, 0.98, 1e-6, Muon(peak_lr=1.0).momentum)


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (('loin', ''), "there is no optimizer=loin; did you mean 'lion'"),
        (('', 'cosin'), "there is no schedule=cosin; did you mean 'cosine'"),
    ],
)
def test_mistakes_name_the_nearest(arguments, message):
    with pytest.raises(UserError, match=message):
        chosen(DEFAULT, *arguments)


@pytest.mark.parametrize('config', [language, recall, long_range, grokking], ids=lambda config: config.__name__)
def test_every_config_chooses_by_name(config):
    size = 'size=smoke,' if config is long_range else 'size=tiny,'
    usual = plain(config.get_config(size))
    for number, optimizer in enumerate(OPTIMIZERS):
        schedule = list(SCHEDULES)[number + 1]
        found = config.get_config(f'{size}optimizer={optimizer},schedule={schedule}')
        made = build(found.optimizer)
        assert (type(made), type(made.schedule)) == (OPTIMIZERS[optimizer].kind, SCHEDULES[schedule])
        assert {**plain(found), 'optimizer': None} == {**usual, 'optimizer': None}


def test_a_chosen_optimizer_is_one_that_trains():
    config = language.get_config('optimizer=muon,schedule=wsd')
    with config.unlocked():
        config.length, config.batch_size, config.model.stack.depth = 32, 2, 1
    prepare(config).trace()
