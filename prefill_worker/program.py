"""The prefill worker's program: chunked prefill, KV export, the first token."""

from baton.config import Settings
from baton.core.states import Role
from baton.worker.program import WorkerProgram


def build(settings: Settings) -> WorkerProgram:
    return WorkerProgram(settings, Role.PREFILL)
