"""``baton serve ROLE``: one program in the foreground, as a container runs it."""

import importlib
import traceback
from pathlib import Path
from typing import Any

from prometheus_client import disable_created_metrics

from baton.config import LOOPBACK, Settings, load_settings, prepare_threads
from baton.core.browser_guard import BrowserGuard
from baton.core.states import Role
from baton.errors import BatonError, Invalid
from baton.obs.logs import set_up_logs
from baton.runtime.last_words import note_termination
from baton.runtime.ops import OpsServer
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
        set_up_logs(settings.log_level, settings.log_format, id=settings.id or role, role=role)
        # a series more for each, of when it began, that nobody asks for
        disable_created_metrics()  # type: ignore[no-untyped-call]
        prepare_threads(settings.threads if Role(role) in WORKERS else 1)
        # Probes and scrapes from elsewhere know us by any name.
        is_here = settings.ops_host in LOOPBACK
        guard = BrowserGuard(hosts=settings.known_hosts(settings.ops_host) if is_here else None)
        ops = OpsServer(STATUS.vitals, settings.hung_seconds, guard)
        address = _open(ops, settings)
        program = importlib.import_module(MODULES[Role(role)]).build(settings)
        serve(program, drain_seconds_of(settings, Role(role)), ops, address)
    except BatonError as error:
        STATUS.send(Report("failed", message=str(error)))
        note_termination(str(error))
        if log_level == "debug":
            traceback.print_exc()
        raise
    except Exception as error:
        note_termination(f"a bug: {error!r}; the log tells more")
        raise


def drain_seconds_of(settings: Settings, role: Role) -> float:
    """A router takes requests for a while yet, before it drains."""
    grace = settings.endpoint_grace_seconds if role is Role.ROUTER else 0.0
    return grace + settings.drain_seconds


def _open(ops: OpsServer, settings: Settings) -> str:
    """Its host:port; empty where there is to be none."""
    if settings.ops_port is None:
        return ""
    return ops.open(settings.ops_host, settings.ops_port)
