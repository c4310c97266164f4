"""A program that only reports its status, for the tests of the supervisor.

    python -m testkit.fakes.program FOLDER ROLE [--status-fd N]

It serves until its standard input is closed, and appends its id to FOLDER/stopped before it exits.
FOLDER/misbehave, a JSON object, maps the id of a process to ``fail`` (it exits with 1), ``wrongly``
(it exits with 2, as for an invalid command line), ``slow`` (it never serves), or ``deaf`` (it does
not stop). The process sends a heartbeat twenty times a second. It reports SIGTERM; SIGUSR1 makes it
report that it has changed to the other pool.
"""

import json
import os
import select
import signal
import sys
from pathlib import Path

from baton.serve.status_pipe import STATUS, StatusReport, open_status_pipe, report_role

BEAT_SECONDS = 0.05
OTHER = {"prefill": "decode", "decode": "prefill"}


def main(folder: Path, role: str, status_fd: int) -> int:
    me = os.environ["BATON_ID"]
    rules = folder / "misbehave"
    rule = json.loads(rules.read_text()).get(me, "") if rules.exists() else ""
    open_status_pipe(status_fd)
    STATUS.send(StatusReport("starting", "weights", 1, 2))
    if rule in ("fail", "wrongly"):
        print(f"baton: {me} can't start", file=sys.stderr)
        return 2 if rule == "wrongly" else 1
    if rule == "slow":
        sys.stdin.read()
        return 0
    signals = {signal.SIGTERM, signal.SIGUSR1}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    STATUS.send(StatusReport("serving", address=f"127.0.0.1:{1000 + len(role)}"))
    while True:
        got = signal.sigtimedwait(signals, BEAT_SECONDS)
        if select.select([0], [], [], 0)[0] and rule != "deaf":
            break
        if got is not None and got.si_signo == signal.SIGTERM:
            STATUS.send_stop_signal()
        if got is not None and got.si_signo == signal.SIGUSR1:
            role = OTHER[role]
            report_role(role, f"127.0.0.1:{1000 + len(role)}")
        STATUS.send_heartbeat()
    STATUS.send(StatusReport("draining"))
    with (folder / "stopped").open("a") as file:
        file.write(f"{me}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[4])))
