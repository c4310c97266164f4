"""The program of a worker: with an engine, or with a server that computes (``attach``, engine
``vllm``).

Whatever its role, a worker with Baton's engine includes both sides, ``prefill_worker`` and
``decode_worker``, so that the role can change while the worker runs. Its modules are imported only
for such a worker, since they import torch.
"""

from baton.config import Settings
from baton.core.states import Role
from baton.serve.lifecycle import Program


def build(settings: Settings, role: Role) -> Program:
    if settings.has_server_workers:
        from attached_worker.program import AttachedProgram

        return AttachedProgram(settings, role)
    from baton.worker.program import SideFactories, WorkerProgram
    from decode_worker.side import open_decode_side
    from prefill_worker.side import open_prefill_side

    return WorkerProgram(settings, role, SideFactories(open_prefill_side, open_decode_side))
