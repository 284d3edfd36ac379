"""What names the nearest valid name to a misspelt one."""

from attnlab.errors import SHOWN, nearest


def test_letters_in_another_order_are_nearer_than_other_letters():
    assert nearest('gal', ['gau', 'gla', 'gqa', 'gsa']) == "; did you mean 'gla'?"


def test_names_that_are_equally_close_are_all_shown():
    assert nearest('gxa', ['gla', 'gqa', 'mamba']) == "; did you mean 'gla' or 'gqa'?"


def test_where_no_name_is_close_all_are_shown_or_the_least_far_of_many():
    assert nearest('xyz', ['gla', 'mha']) == '; valid names: gla, mha'
    assert nearest('xyz', []) == '; valid names: none'
    shown = nearest('zzz', [f'name_{number}' for number in range(60)])
    assert shown.startswith('; the nearest of 60 valid names: ') and shown.count(',') == SHOWN - 1
