"""The files of numbers that a run writes: which lines are kept."""

from attnlab.train.metrics_file import interval_ends, is_accessory, keep_until


def test_lines_after_the_checkpoint_and_half_a_line_are_dropped(tmp_path):
    path = tmp_path / 'metrics.jsonl'
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    keep_until(path, 2, every=1)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    assert [child.name for child in tmp_path.iterdir()] == ['metrics.jsonl']


def test_what_follows_an_at_stays_at_the_end():
    assert interval_ends('valid/loss@2x') == ('valid/loss_low@2x', 'valid/loss_high@2x')
    assert interval_ends('1x/accuracy') == ('1x/accuracy_low', '1x/accuracy_high')
    beside = (*interval_ends('loss@2x'), 'valid/sampled_tokens', 'documents', '1x/examples')
    assert all(map(is_accessory, beside)) and not any(map(is_accessory, ('loss@2x', 'bits_per_byte', '1x/accuracy')))
