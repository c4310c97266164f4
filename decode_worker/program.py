"""The decode worker's program: KV import, continuous batching, token streaming."""

from baton.config import Settings
from baton.core.states import Role
from baton.worker.program import WorkerProgram


def build(settings: Settings) -> WorkerProgram:
    return WorkerProgram(settings, Role.DECODE)
