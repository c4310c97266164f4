"""``baton serve ROLE``: one program in the foreground, as a container runs it."""

import importlib
import traceback
from pathlib import Path
from typing import Any

from prometheus_client import disable_created_metrics

from baton.config import LOOPBACK, Settings, load_settings, set_thread_environment
from baton.core.states import Role
from baton.errors import BatonError, Invalid
from baton.network.browser_guard import BrowserGuard
from baton.obs.logs import configure_logging
from baton.serve.ops_server import OpsServer
from baton.serve.process import serve
from baton.serve.status_pipe import STATUS, StatusReport, open_status
from baton.serve.termination_message import write_termination_message

PROGRAM_MODULES = {
    Role.ROUTER: "router.program",
    Role.CONDUCTOR: "conductor.program",
    Role.PREFILL: "prefill_worker.program",
    Role.DECODE: "decode_worker.program",
    Role.KVSTORE: "kvstore.program",
    Role.MOCK: "baton.worker.mock.program",
}
WORKER_ROLES = (Role.PREFILL, Role.DECODE)


def run_role(role: str, status_fd: int, config: Path | None, flags: dict[str, Any]) -> None:
    """Raises Invalid for an unknown role or setting; what ends the program, otherwise."""
    if role not in [known.value for known in PROGRAM_MODULES]:
        raise Invalid(f"there is no role {role!r}; there are {', '.join(PROGRAM_MODULES)}")
    open_status(status_fd)
    log_level = ""
    try:
        settings = load_settings(config, **flags)
        log_level = settings.log_level
        configure_logging(
            settings.log_level, settings.log_format, id=settings.id or role, role=role
        )
        # a series more for each, of when it began, that nobody asks for
        disable_created_metrics()  # type: ignore[no-untyped-call]
        set_thread_environment(settings.threads if Role(role) in WORKER_ROLES else 1)
        # Probes and scrapes from elsewhere know us by any name.
        is_here = settings.ops_host in LOOPBACK
        guard = BrowserGuard(hosts=settings.known_hosts(settings.ops_host) if is_here else None)
        ops = OpsServer(STATUS.vitals, settings.hung_seconds, guard)
        address = _open(ops, settings)
        program = importlib.import_module(PROGRAM_MODULES[Role(role)]).build(settings)
        serve(program, drain_seconds_of(settings, Role(role)), ops, address)
    except BatonError as error:
        STATUS.send(StatusReport("failed", message=str(error)))
        write_termination_message(str(error))
        if log_level == "debug":
            traceback.print_exc()
        raise
    except Exception as error:
        write_termination_message(f"a bug: {error!r}; the log tells more")
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
