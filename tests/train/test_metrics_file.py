"""The files of numbers that a run writes: which lines are kept."""

from attnlab.train.metrics_file import keep_until


def test_lines_after_the_checkpoint_and_half_a_line_are_dropped(tmp_path):
    path = tmp_path / 'metrics.jsonl'
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    keep_until(path, 2, every=1)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    assert [child.name for child in tmp_path.iterdir()] == ['metrics.jsonl']
