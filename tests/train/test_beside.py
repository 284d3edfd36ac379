"""Names of ends of intervals and counts."""

from attnlab.train.beside import interval_ends, is_accessory


def test_what_follows_an_at_stays_at_the_end():
    assert interval_ends('valid/loss@2x') == ('valid/loss_low@2x', 'valid/loss_high@2x')
    assert interval_ends('1x/accuracy') == ('1x/accuracy_low', '1x/accuracy_high')
    beside = (*interval_ends('loss@2x'), 'valid/sampled_tokens', 'documents', '1x/examples')
    assert all(map(is_accessory, beside)) and not any(map(is_accessory, ('loss@2x', 'bits_per_byte', '1x/accuracy')))
