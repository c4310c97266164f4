"""``baton serve ROLE``: one program in the foreground, as a container runs it."""

import importlib
import traceback
from pathlib import Path
from typing import Any

from baton.config import load_settings, prepare_threads
from baton.core.states import Role
from baton.errors import BatonError, Invalid
from baton.obs.logs import set_up_logs
from baton.runtime.serve import serve
from baton.runtime.status import STATUS, Report, open_status

MODULES = {
    Role.ROUTER: "router.program",
    Role.CONDUCTOR: "conductor.program",
    Role.PREFILL: "prefill_worker.program",
    Role.DECODE: "decode_worker.program",
    Role.KVSTORE: "kvstore.program",
    Role.MOCK: "baton.worker.mock.program",
}
WORKERS = (Role.PREFILL, Role.DECODE)


def run_role(role: str, status_fd: int, config: Path | None, flags: dict[str, Any]) -> None:
    """Raises Invalid for an unknown role or setting; what ends the program, otherwise."""
    if role not in [known.value for known in MODULES]:
        raise Invalid(f"there is no role {role!r}; there are {', '.join(MODULES)}")
    open_status(status_fd)
    log_level = ""
    try:
        settings = load_settings(config, **flags)
        log_level = settings.log_level
        set_up_logs(settings.log_level, settings.log_format, id=settings.id or role)
        prepare_threads(settings.threads if Role(role) in WORKERS else 1)
        program = importlib.import_module(MODULES[Role(role)]).build(settings)
        serve(program, settings.drain_seconds)
    except BatonError as error:
        STATUS.send(Report("failed", message=str(error)))
        if log_level == "debug":
            traceback.print_exc()
        raise
