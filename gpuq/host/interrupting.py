"""Ctrl-C while the main thread itself is in a compiled kernel.

Python runs signal handlers between two of its own instructions, so none runs while compiled code
waits. What does run at once is the part of the interpreter that notes the signal: it writes the
signal's number to a descriptor (`signal.set_wakeup_fd`), and a thread that reads it acts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def acting_at_interrupt(act: Callable[[], None]) -> Iterator[None]:
    """Call `act` in a thread as soon as SIGINT comes; anything that a handler does comes later.

    Only the main thread is ever interrupted; elsewhere this does nothing. Who had a wake-up
    descriptor before gets every signal all the same, and has it back afterwards.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    before = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    watcher = threading.Thread(
        target=_watch, args=(receiver, before, act), name="gpuq-interrupt", daemon=True
    )
    try:
        watcher.start()
        yield
    finally:
        signal.set_wakeup_fd(before)
        # Its end is the end of the thread, which reads what came before that. It is waited for:
        # the descriptor that it passes signals on to may be closed next, and its number reused.
        sender.close()
        if watcher.ident is not None:
            watcher.join()


def _watch(receiver: socket.socket, before: int, act: Callable[[], None]) -> None:
    with receiver:
        while numbers := receiver.recv(64):
            if signal.SIGINT in numbers:
                act()
            if before >= 0:
                with contextlib.suppress(OSError):
                    os.write(before, numbers)
