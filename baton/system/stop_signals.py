"""The signals that ask a process to stop, and who heeds them.

They may reach all processes of a cluster at once, for example from systemd. Then only the one that
started the others heeds them, and stops the others in order, by other means.
"""

import asyncio
import signal
from collections.abc import Callable

STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


def handle_stop_signals(on_stop: Callable[[bool], None]) -> None:
    """Call ``on_stop`` on the running event loop for each of these signals. The argument is whether
    it is SIGINT (Ctrl-C), which a person repeats in order to stop at once. SIGTERM and SIGHUP ask
    for the same however often they arrive: ``timeout`` and make, for example, send them to the
    process and then to its whole group.

    A SIGHUP that was ignored when the process started stays ignored, as nohup expects."""
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, on_stop, number == signal.SIGINT)


def ignore_stop_signals() -> None:
    """Make this helper process ignore them: its parent still needs it while it drains, and ends it
    afterwards."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def block_stop_signals() -> None:
    """Make the program that this process executes next never receive them, even if it has handlers
    for them. Safe between fork and exec."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
