"""The programs of prefill, decode and mixed workers.

All of them include both sides, ``prefill_worker`` and ``decode_worker``, so that a worker's role
can change while the worker runs.
"""

from baton.config import Settings
from baton.core.states import Role
from baton.worker.program import SideFactories, WorkerProgram
from decode_worker.side import open_decode_side
from prefill_worker.side import open_prefill_side

SIDES = SideFactories(open_prefill_side, open_decode_side)


def build_prefill(settings: Settings) -> WorkerProgram:
    return WorkerProgram(settings, Role.PREFILL, SIDES)


def build_decode(settings: Settings) -> WorkerProgram:
    return WorkerProgram(settings, Role.DECODE, SIDES)


def build_mixed(settings: Settings) -> WorkerProgram:
    return WorkerProgram(settings, Role.MIXED, SIDES)
