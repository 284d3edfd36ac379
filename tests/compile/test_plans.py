"""The page of plans is what the commands beside them print."""

import pytest

from tests.compile import plans

PRINTED = """# parameters
name\tshape
a\t2

# memory of one device
what\tbytes
b\t3

whole on every device: nothing
"""


def test_a_plan_is_shown_without_its_parameters():
    assert plans.shown(PRINTED).splitlines() == PRINTED.splitlines()[4:]


def test_sections_that_are_not_made_anew_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(plans, 'DOCUMENT', tmp_path / 'plans.md')
    one, other = plans.command('mha', 'v5p:2x2x4'), plans.command('gla', 'v5p:4x4x4')
    plans.write({one: plans.section('one')})
    plans.write({other: plans.section('other')})
    made = plans.sections()
    assert (made[one], made[other]) == (plans.section('one'), plans.section('other'))
    assert plans.DOCUMENT.read_text().count(plans.NOT_MADE) == len(plans.RECIPES) * len(plans.SLICES) - 2


def test_sections_of_programs_that_kept_more_are_said_to_be_so(tmp_path, monkeypatch):
    monkeypatch.setattr(plans, 'DOCUMENT', tmp_path / 'plans.md')
    line = plans.command('mha', 'v5p:2x2x4')
    for bound, said in ('all three at once', True), ('all at once', False):
        plans.write({line: plans.section(f'{bound}\t1,627\tms')})
        assert ('before 26 November 2026' in plans.DOCUMENT.read_text()) == said


def test_the_page_is_of_the_commands_that_are_named(tmp_path, monkeypatch):
    made, page = plans.sections(), plans.DOCUMENT.read_text()
    monkeypatch.setattr(plans, 'DOCUMENT', tmp_path / 'plans.md')
    plans.write(made)
    assert plans.DOCUMENT.read_text() == page


@pytest.mark.parametrize(('word', 'status'), [('--help', 0), ('retnet', 2)])
def test_a_word_that_is_no_recipe_of_the_page_writes_nothing(word, status, tmp_path, monkeypatch):
    monkeypatch.setattr(plans, 'DOCUMENT', tmp_path / 'plans.md')
    with pytest.raises(SystemExit) as ended:
        plans.main([word])
    assert ended.value.code == status and not plans.DOCUMENT.exists()
