"""Which folders are checkpoints, to all who look for them."""

import pytest
from flax import nnx
from ml_collections import ConfigDict

from attnlab.errors import UserError
from attnlab.train.fork import fork
from attnlab.train.run import newest_checkpoint
from attnlab.train.saved import steps_in
from attnlab.train.start import FromRun
from attnlab.train.state import TrainState


def test_a_step_is_a_folder_named_as_checkpoints_are(tmp_path):
    folder = tmp_path / 'checkpoints'
    for name in ('007', '٧', 'damaged-8'):
        (folder / name).mkdir(parents=True)
    (folder / '5').write_text('')
    assert steps_in(folder) == [] and steps_in(tmp_path / 'none') == [] and newest_checkpoint(tmp_path) == 0
    with pytest.raises(UserError, match='which has no checkpoint yet'):
        fork(tmp_path, ConfigDict())
    with pytest.raises(UserError, match=r'which has no checkpoint$'):
        FromRun(str(tmp_path)).check(TrainState(nnx.State({}), (), 0))
    (folder / '10').mkdir()
    (folder / '9').mkdir()
    assert steps_in(folder) == [9, 10] and newest_checkpoint(tmp_path) == 10
    with pytest.raises(UserError, match=r'which has no checkpoint of step 7; it has: 9, 10$'):
        fork(tmp_path, ConfigDict(), step=7)
