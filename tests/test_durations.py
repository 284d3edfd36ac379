"""What takes long is left to the night by seconds that are read from pytest's output."""

from tests import durations

OUTPUT = """
============================= slowest durations ==============================
2.50s call     tests/train/test_step.py::test_one[a@b-int4@32]@tpu
1.25s setup    tests/train/test_step.py::test_one[a@b-int4@32]@tpu
0.75s call     tests/sweep/test_study.py::test_two@sweep_unbroken
0.49s call     tests/sweep/test_study.py::test_quick
0.75s teardown tests/sweep/test_study.py::test_two@sweep_unbroken
======================= 3 passed in 4.00s =======================
"""


def test_seconds_are_of_tests_without_their_groups():
    found = durations.read(OUTPUT.splitlines())
    assert found == {
        ('tests/train/test_step.py::test_one[a@b-int4@32]', 'call'): 2.5,
        ('tests/train/test_step.py::test_one[a@b-int4@32]', 'setup'): 1.25,
        ('tests/sweep/test_study.py::test_two', 'call'): 0.75,
    }


def test_what_is_written_is_read_again():
    found = durations.read(durations.FILE.read_text().splitlines())
    assert found and durations.read(durations.written(found).splitlines()) == found
