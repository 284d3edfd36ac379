"""How worker processes of data end."""

import multiprocessing
import os
import signal
import threading

GRACE = 60.0
"""Seconds that a worker goes on after SIGTERM, in which its parent saves and ends it."""


def end_with_the_parent() -> None:
    """Ends this process when its parent dies, as it would otherwise wait for work forever."""
    parent = multiprocessing.parent_process()

    def wait() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def leave_stopping_to_the_parent() -> None:
    """Has this process go on where it is asked to stop, as a shell or a scheduler asks all processes of a job.

    The parent needs rows until it has saved, and ends its workers itself; one that it asks by SIGTERM ends in the end.
    """

    def outlive(number: int, frame: object) -> None:
        del number, frame
        ending = threading.Timer(GRACE, os._exit, (1,))
        ending.daemon = True
        ending.start()

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, outlive)
