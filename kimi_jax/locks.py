"""Files and folders that one process at a time may write."""

import fcntl


def take(descriptor: int) -> bool:
    """Locks an open file or folder until it is closed; False if another process has it.

    A process that is killed leaves no lock behind.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
