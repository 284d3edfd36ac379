"""Storage of trials in a database, which retries operations during short outages."""

import random
import sys
import time
from collections.abc import Callable
from typing import Any

from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.storages import BaseStorage, RDBStorage, get_storage
from sqlalchemy.exc import InterfaceError, OperationalError, PendingRollbackError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from attnlab.errors import UserError

PATIENCE = 600.0
"""Seconds for which operations on a database that has answered before are retried."""

PAUSE = 1.0
TRIES = 8
"""Attempts at creating the tables: workers that start together on an empty database may conflict."""

OUTAGES = (OperationalError, InterfaceError, PendingRollbackError)
"""Errors that count as an outage; the last is raised where Optuna caught another and reused the broken connection."""


def open_database(address: str) -> BaseStorage:
    """Opens Optuna's storage at an address such as `postgresql://USER@HOST/NAME`, creating its tables where missing.

    Raises `UserError` where the driver is missing, the address is not valid, or no database answers there.
    """
    scheme, separator, rest = address.partition('://')
    if not separator:
        raise UserError(f'--storage is {address!r}; it must be an address such as postgresql://USER@HOST/NAME')
    if scheme == 'postgresql':
        address = f'postgresql+psycopg://{rest}'
    for attempt in range(1, TRIES + 1):
        try:
            # A new connection for every operation: servers and firewalls drop one that is idle for hours of training.
            storage: BaseStorage = Patient(get_storage(RDBStorage(address, engine_kwargs={'poolclass': NullPool})))
            return storage
        except ImportError as error:
            wanted = 'pip install "attnlab[postgresql]"' if scheme == 'postgresql' else f'{error.__cause__ or error}'
            raise UserError(f'{scheme} needs a driver that is not installed: {wanted}') from error
        except (SQLAlchemyError, StorageInternalError) as error:
            if attempt == TRIES or _is_outage(error):
                raise UserError(f'the database at --storage cannot be opened: {_reason(error)}') from error
            time.sleep(PAUSE * random.random())
    raise AssertionError('unreachable')


def _retried(name: str) -> Callable[..., Any]:
    """Returns a method of a storage that is retried during an outage.

    Repeating an operation that did succeed does no harm: attributes and values are set to what they already are,
    and a trial created twice leaves one without a worker, which is claimed next.
    """

    def ask(self: Any, *arguments: Any, **named: Any) -> Any:
        began, again = time.monotonic(), False
        while True:
            try:
                return getattr(self._storage, name)(*arguments, **named)
            except UpdateFinishedTrialError:
                if not again or name != 'set_trial_state_values':
                    raise
                return True
            except StorageInternalError as error:
                waited = time.monotonic() - began
                if not _is_outage(error) or waited > PATIENCE:
                    raise UserError(
                        f'the database failed for {waited:.0f} s: {_reason(error)}; the same command goes on from there'
                    ) from error
                if not again:
                    print(f'the database does not answer, waiting: {_reason(error)}', file=sys.stderr, flush=True)
                again = True
            time.sleep(PAUSE)

    return ask


def _init(self: Any, storage: BaseStorage) -> None:
    self._storage = storage


Patient = type(
    'Patient',
    (BaseStorage,),
    {'__init__': _init, '__doc__': 'A storage that outlives short outages of another.'}
    | {name: _retried(name) for name in vars(BaseStorage) if not name.startswith('_')},
)


def _is_outage(error: Exception) -> bool:
    return isinstance(error if isinstance(error, SQLAlchemyError) else error.__cause__, OUTAGES)


def _reason(error: Exception) -> str:
    """The message of the server or its driver, in one line."""
    cause = error if isinstance(error, SQLAlchemyError) else error.__cause__
    return str(getattr(cause, 'orig', cause)).strip().replace('\n', ' ')
