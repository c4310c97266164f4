"""Tests that an installation has one top-level package, and works beside packages of others that
have the names of the programs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from baton.network.free_port import free_port
from testkit.local_cluster import LocalCluster
from tests.wheel import build_wheel, install

pytestmark = pytest.mark.timeout(300)
FOREIGN = ("router/__init__", "redis", "conductor", "command_line", "kvstore", "simulator")
GENERATE = ("generate", "--prompt", "Once upon", "--max-tokens", "4", "--json")


class Installed(LocalCluster):
    """Runs the installed ``baton``."""

    command: tuple[str, ...]
    folder: Path

    def baton(self, *arguments: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*self.command, *arguments],
            env=self.environment, cwd=self.folder, check=check,
            capture_output=True, text=True, timeout=self.timeout_seconds,
        )  # fmt: skip


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("installed")
    python, site = install(build_wheel(folder), folder / "environment")
    assert {path.name for path in site.iterdir()} == {
        "baton", "baton-0.1.0.dist-info", "dependencies.pth"
    }  # fmt: skip
    # Other distributions of the same environment, and the working folder.
    for place, names in (
        (site, [name for name in FOREIGN if name != "redis"]),
        (folder / "foreign", FOREIGN),
    ):
        for name in names:
            path = place / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("raise RuntimeError('foreign')")
    kept = {key: value for key, value in os.environ.items() if not key.startswith("BATON_")}
    environment = kept | {"BATON_HOME": str(folder / "home"), "PYTHONPATH": os.pathsep}
    cluster = Installed(f"http://127.0.0.1:{free_port()}", folder / "home", environment)
    cluster.command = (str(python), "-m", "baton")
    cluster.folder = folder / "foreign"
    return cluster


def test_an_installed_cluster_runs_beside_foreign_packages(installed: Installed) -> None:
    (answer,) = map(json.loads, installed.baton(*GENERATE).stdout.splitlines())
    assert len(answer["token_ids"]) == 4
    simulated = installed.baton(
        "simulate", "--kind", "chat", "--rate", "4", "--requests", "20", "--json"
    )
    assert json.loads(simulated.stdout)
    port = installed.url.rpartition(":")[2]
    try:
        up = installed.baton("up", "--detach", "--mixed", "1", "--port", port, check=False)
        assert up.returncode == 0, up.stdout + up.stderr
        assert len(installed.complete([49, 80], 4)) == 4
        assert "kvstore" in installed.baton("check").stdout
    finally:
        installed.baton("down", check=False)


def test_the_checkout_runs_beside_foreign_packages(installed: Installed) -> None:
    script = str(Path(sys.executable).with_name("baton"))
    for command in ((script,), (sys.executable, "-m", "baton")):
        answer = subprocess.run(
            [*command, *GENERATE],
            env=installed.environment, cwd=installed.folder, check=True,
            capture_output=True, text=True, timeout=100,
        )  # fmt: skip
        assert len(json.loads(answer.stdout)["token_ids"]) == 4
