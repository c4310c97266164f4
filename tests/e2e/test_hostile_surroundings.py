"""Starts a cluster in surroundings that must not matter: as a user whom the system doesn't know,
without a home folder, in a working folder whose files have the names of modules, among variables of
Kubernetes, and without what only Linux has."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from baton.network.free_port import free_port
from orchestrator.cluster_state import ClusterFolder
from testkit.local_cluster import LocalCluster
from tests.unit.baton.config.test_service_variables import OF_ROUTER, OF_SETTINGS_NAMES

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs user namespaces and /proc")

UNKNOWN_USER = ("unshare", "--user", "--map-user=12345", "--map-group=12345")
"""Runs a command as a user without name, home folder and capabilities, who owns the files of this
process's user."""

SECRETS = {
    "CLUSTER_SECRET": "s3-cluster",
    "ADMIN_KEY": "s3-admin",
    "TENANT_SECRET": "s3-tenant",
    "API_KEYS": "s3-key=a",
}
OURS = ("baton", "command_line", "conductor", "decode_worker", "kvstore", "load_generator",
        "orchestrator", "prefill_worker", "router", "simulator")  # fmt: skip
DEPENDENCIES = ("fastapi", "grpc", "httptools", "httpx", "llguidance", "numpy", "orjson", "psutil",
                "pydantic", "redis", "rich", "structlog", "tokenizers", "torch", "typer", "uvicorn",
                "uvloop", "xxhash", "yaml")  # fmt: skip
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


class Surroundings(LocalCluster):
    """A cluster whose commands are run by the unknown user in the folder ``traps``."""

    traps: Path

    def baton(self, *arguments: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*UNKNOWN_USER, str(Path(sys.executable).with_name("baton")), *arguments],
            env=self.environment,
            cwd=self.traps,
            capture_output=True,
            text=True,
            check=check,
            timeout=self.timeout_seconds,
        )


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Surroundings]:
    if subprocess.run([*UNKNOWN_USER, "true"], capture_output=True).returncode:
        pytest.skip("this machine allows no user namespaces")
    folder = tmp_path_factory.mktemp("hostile")
    traps, home = folder / "traps", folder / "home"
    traps.mkdir()
    trap = "import pathlib, sys\npathlib.Path(__file__).with_suffix('.sprung').write_text(__name__)"
    for name in {*sys.stdlib_module_names, *OURS, *DEPENDENCIES}:
        (traps / f"{name}.py").write_text(trap)
    port = free_port()
    environment = {
        "PATH": os.environ["PATH"],
        "BATON_HOME": str(home),
        "BATON_PORTABLE": "1",
        "HF_TOKEN": "s3-hub",
        **{f"BATON_{name}": value for name, value in SECRETS.items()},
        **OF_ROUTER,
        **OF_SETTINGS_NAMES,
    }
    running = Surroundings(f"http://127.0.0.1:{port}", home, environment, "s3-key")
    running.traps = traps
    try:
        up = running.baton("up", "--detach", "--mixed", "1", "--port", str(port), check=False)
        assert up.returncode == 0, up.stdout + up.stderr
        yield running
    finally:
        running.baton("down", check=False)


def test_cluster_serves_and_imports_nothing_from_its_folder(cluster: Surroundings) -> None:
    format_ = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 40}
    answer = cluster.post("/v1/chat/completions", body | {"response_format": format_})
    assert answer["usage"]["completion_tokens"] > 0
    for command in (["status"], ["check"], ["doctor"], ["usage"], ["logs", "mixed-0"]):
        done = cluster.baton(*command)
        assert "Traceback" not in done.stdout + done.stderr
    assert [path.name for path in cluster.traps.glob("*.sprung")] == []


def test_each_process_has_only_the_secrets_that_it_reads(cluster: Surroundings) -> None:
    supervisor = ClusterFolder(cluster.home, "default").read_running().supervisor_pid
    found = {
        _program(child): {
            name for name in (*SECRETS, "HF_TOKEN") if f"{name}=" in _variables(child)
        }
        for child in psutil.Process(supervisor).children(recursive=True)
    }
    shared = {"CLUSTER_SECRET", "HF_TOKEN"}
    assert found == {
        "valkey-server": set(),
        "baton.system.child_guard": set(),
        "baton.text.grammar.helper_process": set(),
        "kvstore": shared,
        "conductor": shared,
        "mixed": shared,
        "router": {*SECRETS, "HF_TOKEN"},
    }


def _program(process: psutil.Process) -> str:
    """Return the role of one of Baton's programs, or the name of any other program."""
    words = process.cmdline()
    if "serve" in words:
        return words[words.index("serve") + 1]
    return words[words.index("-m") + 1] if "-m" in words else process.name()


def _variables(process: psutil.Process) -> str:
    return Path(f"/proc/{process.pid}/environ").read_text()
