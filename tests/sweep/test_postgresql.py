"""Studies in PostgreSQL: real servers, hosts that share no folder, outages."""

import concurrent.futures
import glob
import os
import pathlib
import pwd
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time

import pytest
from optuna.trial import TrialState

from attnlab.configuration import config_of
from attnlab.errors import UserError
from attnlab.sweep import database
from attnlab.sweep.study import create_study
from tests.sweep.conftest import TINY
from tests.sweep.processes import CONFIG, assert_whole, steps_of, until

# One server for them all.
pytestmark = pytest.mark.xdist_group('sweep')


class Server:
    """A PostgreSQL server on loopback, in a folder of its own; it refuses to run as root."""

    def __init__(self, programs: pathlib.Path, folder: pathlib.Path):
        self._programs, self._folder = programs, folder
        self._user = {}
        if os.getuid() == 0:
            owner = pwd.getpwnam('nobody')
            self._user = {'user': owner.pw_uid, 'group': owner.pw_gid, 'extra_groups': []}
            os.chown(folder, owner.pw_uid, owner.pw_gid)
        with socket.socket() as sock:
            sock.bind(('127.0.0.1', 0))
            self._port = sock.getsockname()[1]
        self._run('initdb', '--auth=trust', '--username=attnlab', '--no-sync')
        self.start()
        self._databases = 0

    def _run(self, program, *arguments):
        argv = [self._programs / program, '-D', self._folder / 'data', *arguments]
        with (self._folder / 'output').open('a') as output:
            subprocess.run(argv, check=True, cwd='/', stdout=output, stderr=output, timeout=60, **self._user)

    def start(self):
        options = f'-p {self._port} -c listen_addresses=127.0.0.1 -c fsync=off -k {self._folder}'
        self._run('pg_ctl', 'start', '-w', '-o', options)

    def stop(self):
        """Ends it, open connections too."""
        self._run('pg_ctl', 'stop', '-w', '-m', 'fast')

    def new(self):
        """The address of an empty database."""
        self._databases += 1
        address = ['-h', '127.0.0.1', '-p', str(self._port), '-U', 'attnlab']
        subprocess.run([self._programs / 'createdb', *address, f'sweep{self._databases}'], check=True, timeout=60)
        return f'postgresql://attnlab@127.0.0.1:{self._port}/sweep{self._databases}'


@pytest.fixture(scope='session')
def server():
    found = sorted(glob.glob('/usr/lib/postgresql/*/bin/pg_ctl'))
    programs = shutil.which('pg_ctl') or (found[-1] if found else None)
    if programs is None:
        pytest.skip('PostgreSQL is not installed')
    # Not below the folder of the tests, which nobody but their user may enter.
    with tempfile.TemporaryDirectory(prefix='attnlab-postgresql-') as folder:
        made = Server(pathlib.Path(programs).resolve().parent, pathlib.Path(folder))
        yield made
        made.stop()


def test_hosts_take_turns_and_an_outage_is_sat_out(server, make, capsys):
    """What is written, asked and ended while the server is away is so when it is back."""
    address = server.new()
    one, other = make('trials=3', 'one/study', address), make('trials=3', 'two/study', address)
    first, second = one.claim(), other.claim()
    assert (first.number, second.number) == (0, 1) and first.drawn != second.drawn
    assert first.drawn == make('trials=3', 'journal').claim().drawn
    server.stop()
    back = threading.Timer(2.0, server.start)
    back.start()
    first.trial.report(0.1 + 0.2, 6)
    assert not back.is_alive() and 'the database does not answer, waiting: ' in capsys.readouterr().err
    one.tell(first, TrialState.COMPLETE, 1e-300)
    assert (one.best().value, one.best().intermediate_values) == (1e-300, {6: 0.1 + 0.2})
    second.release()
    assert other.claim().number == 1 and [trial.number for trial in one.trials()] == [0, 1]


def test_an_end_that_was_heard_before_the_connection_broke_counts_once(server, make, monkeypatch):
    study = make('trials=1', storage=server.new())
    claim = study.claim()
    backend = study.storage._storage
    told = backend.set_trial_state_values
    lost = [True]

    def loses_the_answer(*arguments, **named):
        told(*arguments, **named)
        if lost.pop() if lost else False:
            raise database.StorageInternalError from database.OperationalError('COMMIT', {}, Exception('gone'))

    monkeypatch.setattr(backend, 'set_trial_state_values', loses_the_answer)
    study.tell(claim, TrialState.COMPLETE, 2.0)
    assert not lost and study.best().value == 2.0


def test_a_long_outage_ends_the_worker_and_says_so(server, make, monkeypatch):
    address = server.new()
    study = make('trials=1', storage=address)
    monkeypatch.setattr(database, 'PATIENCE', 0.5)
    server.stop()
    try:
        with pytest.raises(UserError, match=r'the database failed for [12] s: .*refused.*; the same command goes on'):
            study.claim()
        with pytest.raises(UserError, match=r'the database at --storage cannot be opened: .*refused'):
            database.open_database(address)
    finally:
        server.start()
    assert study.claim().number == 0


def test_workers_that_start_at_once_make_the_tables_once(server):
    address, together = server.new(), threading.Barrier(8)

    def opened():
        together.wait()
        return database.open_database(address)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert [waiting.result() for waiting in [pool.submit(opened) for _ in range(8)]]


def test_a_missing_driver_is_named(make, monkeypatch):
    monkeypatch.setitem(sys.modules, 'psycopg', None)
    with pytest.raises(UserError, match=r'postgresql needs a driver .*: pip install "attnlab\[postgresql\]"'):
        make(storage='postgresql://nobody@nowhere/nothing')
    with pytest.raises(UserError, match="--storage is 'nothing'; it must be an address such as postgresql://"):
        make(folder='other', storage='nothing')


@pytest.mark.slow
@pytest.mark.parametrize('shared', [False, True], ids=['two_folders', 'one_folder'])
def test_a_worker_is_killed_the_server_goes_away_and_nothing_shows_of_it(server, attnlab, unbroken, tmp_path, shared):
    """Two hosts with a folder each, or two workers on one."""
    address = server.new()
    folders = [tmp_path / host / 'study' for host in ('one', 'one' if shared else 'two')]
    for folder in folders:
        create_study(folder, config_of(TINY), address)

    def start(folder):
        return attnlab('worker', f'--study={folder}', f'--storage={address}')

    doomed, other = (start(folder) for folder in folders)
    until(lambda: any(steps_of(folders[0], number) > 3 for number in range(4)))
    doomed.kill()
    heir = start(folders[0])
    assert 'at work' in heir.stdout.readline()
    server.stop()
    time.sleep(3)
    server.start()
    outputs = []
    for process in (other, heir):
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, output
        outputs.append(output)
    assert any('the database does not answer' in output for output in outputs), outputs
    assert_whole(folders[0], unbroken, address, elsewhere=() if shared else folders[1:])


@pytest.mark.slow
def test_a_sweep_in_a_database_is_the_sweep_in_a_journal(server, attnlab, unbroken, tmp_path):
    address = server.new()
    sweep = attnlab(CONFIG, f'--study={tmp_path / "study"}', f'--storage={address}', '--workers=2')
    output, _ = sweep.communicate(timeout=240)
    assert sweep.returncode == 0 and '4 done; best' in output, output
    assert_whole(tmp_path / 'study', unbroken, address)
