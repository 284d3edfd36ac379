"""What names the nearest valid name to a misspelt one, and what names the extra of a missing package."""

import sys

import pytest

from attnlab.errors import SHOWN, UserError, nearest, optional


def test_letters_in_another_order_are_nearer_than_other_letters():
    assert nearest('gal', ['gau', 'gla', 'gqa', 'gsa']) == "; did you mean 'gla'?"


def test_names_that_are_equally_close_are_all_shown():
    assert nearest('gxa', ['gla', 'gqa', 'mamba']) == "; did you mean 'gla' or 'gqa'?"


def test_where_no_name_is_close_all_are_shown_or_the_least_far_of_many():
    assert nearest('xyz', ['gla', 'mha']) == '; valid names: gla, mha'
    assert nearest('xyz', []) == '; valid names: none'
    shown = nearest('zzz', [f'name_{number}' for number in range(60)])
    assert shown.startswith('; the nearest of 60 valid names: ') and shown.count(',') == SHOWN - 1


def test_a_package_that_is_missing_names_its_extra_and_one_that_is_broken_its_own_error(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, 'lark', None)
    with pytest.raises(UserError, match=r'a grammar needs lark, which is not installed: pip .* "attnlab\[grammar\]"'):
        optional('lark', 'a grammar')
    (tmp_path / 'broken.py').write_text('from lark_of_ours import Lark')
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match='lark_of_ours'):
        optional('broken', 'a grammar')
