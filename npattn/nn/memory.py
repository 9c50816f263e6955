"""keep_freed_memory: a training loop need not give its arrays back to the system at every step."""

import ctypes

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # malloc.h


def keep_freed_memory(most: int = 1 << 30) -> bool:
    """Let the process keep memory that arrays have freed, for the next arrays.

    By default glibc returns large freed blocks to the system, and every new array is paid for page by page. A
    training step that makes the same arrays again and again loses a quarter of its time to it (nanoGPT's CPU
    recipe on one thread of a Zen 4: 64 ms a step, 50 ms with this).

    Parameters
    ----------
    most : int, default 2**30
        Bytes of free memory the process may hold on to, and the size from which a block is returned at once.

    Returns
    -------
    bool
        Whether the C library took the setting: True with glibc, False elsewhere, where nothing is changed.

    Notes
    -----
    It holds for the whole process, so a library does not do it by itself: call it once, at a program's start.

    Examples
    --------
    >>> from npattn import nn
    >>> nn.keep_freed_memory() in (True, False)
    True
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    capped = min(most, (1 << 31) - 1)  # an int; glibc refuses an mmap threshold above half its heap limit
    kept = bool(mallopt(TRIM_THRESHOLD, capped))
    return bool(mallopt(MMAP_THRESHOLD, min(capped, 32 << 20))) and kept


__all__ = ["keep_freed_memory"]
