"""Tests that share what is dear to make follow one another in one worker."""

import os

import pytest


@pytest.mark.skipif('PYTEST_XDIST_WORKER' not in os.environ, reason='there is one worker')
@pytest.mark.xdist_group('groups')
def test_the_workers_keep_to_groups(request: pytest.FixtureRequest):
    # pytest-xdist tells its scheduler of a group by the end of the name.
    assert request.node.nodeid.endswith('@groups'), 'this version of pytest-xdist does not serve this one of pytest'
