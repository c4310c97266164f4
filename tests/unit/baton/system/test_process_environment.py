"""Tests what a process hands on to those that it starts, and users without a home folder."""

import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from baton.config import Reader, baton_home, load_settings
from baton.core.states import Role
from baton.core.worker_kinds import WORKER_KINDS
from baton.errors import Invalid
from baton.system import process_environment
from baton.system.native_library import library_folders
from baton.system.process_environment import prepare_environment
from baton.text.grammar.checker import GrammarHelperProcess
from orchestrator.cluster_state import ClusterFolder
from orchestrator.launch_specs import LaunchSpecs
from tests.byte_grammars import schema

SECRETS = {
    "cluster_secret": "s3-cluster",
    "admin_key": "s3-admin",
    "tenant_secret": "s3-tenant",
    "api_keys": "s3-key=a",
    "redis_url": "redis://:s3-redis@127.0.0.1:1/0",
}
SHARED = {"cluster_secret", "redis_url"}


@pytest.fixture
def unknown_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the user one whom the system doesn't know, without variables that describe him."""

    def find(uid: int) -> pwd.struct_passwd:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", find)
    monkeypatch.setattr(process_environment, "_kept", {})
    for name in ("HOME", "BATON_HOME", "LOGNAME", "USER", "LNAME", "USERNAME", "PYTHONSAFEPATH"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("unknown_user")
def test_user_without_a_home_learns_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"^this user has no home folder: set BATON_HOME to a folder"):
        baton_home()
    assert library_folders(tmp_path / "kernels") == [tmp_path / "built"]


@pytest.mark.usefixtures("unknown_user")
def test_baton_home_serves_as_home_of_a_user_without_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    prepare_environment()
    assert os.environ["HOME"] == str(tmp_path)
    assert os.environ["USER"] == f"user-{os.getuid()}"
    assert library_folders(tmp_path)[1] == tmp_path / ".cache" / "baton" / "native"


def test_writable_home_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(process_environment, "_kept", {})
    for name in ("HOME", "BATON_HOME", "PYTHONSAFEPATH"):
        monkeypatch.setenv(name, str(tmp_path / name))
    (tmp_path / "HOME").mkdir()
    prepare_environment()
    assert os.environ["HOME"] == str(tmp_path / "HOME")


def test_settings_are_read_but_not_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_environment, "_kept", {})
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    monkeypatch.setenv("BATON_PORT", "8123")
    prepare_environment()
    assert "BATON_PORT" not in os.environ
    assert load_settings().port == 8123
    code = "import os, sys; print(sys.flags.safe_path, 'BATON_PORT' in os.environ)"
    printed = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
    assert printed.stdout.split() == [b"True", b"False"]


def test_only_programs_that_read_a_secret_get_it(tmp_path: Path) -> None:
    settings = load_settings(port=0, **SECRETS)
    specs = LaunchSpecs(settings, ClusterFolder(tmp_path, "test"))
    (router,) = specs.routers()
    spec_of = {
        Reader.ROUTER: router,
        Reader.CONDUCTOR: specs.conductor(),
        Reader.WORKER: specs.worker(Role.DECODE),
        Reader.KVSTORE: specs.store(),
        Reader.MOCK: specs.mock(),
    }
    found = {
        reader: {name for name in SECRETS if f"BATON_{name.upper()}" in spec.environment}
        for reader, spec in spec_of.items()
    }
    assert found == dict.fromkeys(spec_of, SHARED) | {Reader.ROUTER: set(SECRETS)}
    for role in WORKER_KINDS:
        assert SECRETS.keys() & specs.remote_worker(role).settings.keys() == SHARED


def test_embedded_redis_gets_no_secret_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    specs = LaunchSpecs(load_settings(port=0), ClusterFolder(tmp_path, "test"))
    monkeypatch.setenv("HF_TOKEN", "s3-hub")
    (tmp_path / "clusters" / "test").mkdir(parents=True)
    assert not {"HF_TOKEN", "BATON_HOME"} & specs.redis().environment.keys()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_grammar_helper_gets_no_secret_and_can_open_no_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BATON_ADMIN_KEY", "s3-admin")
    monkeypatch.setenv("HF_TOKEN", "s3-hub")
    helper = GrammarHelperProcess([])
    try:
        assert helper.check(schema({"type": "object"})) == ""  # so it has started
        folder = Path(f"/proc/{helper._process.pid}")
        assert b"s3-" not in (folder / "environ").read_bytes()
        assert "Max open files            0                    0" in (folder / "limits").read_text()
    finally:
        helper.kill()
