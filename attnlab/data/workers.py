"""Worker processes that make data, which end with the process that they make them for."""

import multiprocessing
import os
import threading


def end_with_the_parent() -> None:
    """Ends this process when its parent dies, as it would otherwise wait for work forever."""
    parent = multiprocessing.parent_process()

    def wait() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
