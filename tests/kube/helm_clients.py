"""Clients for Helm 3 and Helm 4 with the same interface. Helm 4 comes from helm-python-sdk, Helm 3
from npm (see ``tests/helm/helm3_parity.py``)."""

import json
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import yaml

from tests.helm.helm3_parity import CHART


class HelmFailed(Exception):
    """Helm exited with an error. The message is Helm's own."""


class Helm(Protocol):
    """A Helm client for one namespace of one cluster. If ``wait`` is set, a method waits until
    everything is ready. All methods raise HelmFailed."""

    def install(
        self, name: str, values: Mapping[str, Any], *, wait: bool = False, seconds: int = 60
    ) -> None: ...

    def upgrade(
        self, name: str, values: Mapping[str, Any], *, wait: bool = False, seconds: int = 60
    ) -> None: ...

    def rollback(
        self, name: str, revision: int, *, wait: bool = False, seconds: int = 60
    ) -> None: ...

    def uninstall(self, name: str, *, wait: bool = False, seconds: int = 60) -> None: ...

    def statuses(self, name: str) -> list[str]:
        """Return the status of each revision."""
        ...

    def test(self, name: str, *, seconds: int = 60) -> None:
        """Run ``helm test``."""
        ...


class Helm4:
    def __init__(self, kubeconfig: Path, namespace: str) -> None:
        from helm_python import Config

        self.config = Config(
            kubeconfig_path=kubeconfig, namespace=namespace, qps=500, burst_limit=500
        )

    def install(
        self, name: str, values: Mapping[str, Any], *, wait: bool = False, seconds: int = 60
    ) -> None:
        with _translated():
            self.config.install(CHART, name, dict(values), **_waiting(wait, seconds))

    def upgrade(
        self, name: str, values: Mapping[str, Any], *, wait: bool = False, seconds: int = 60
    ) -> None:
        with _translated():
            self.config.upgrade(CHART, name, dict(values), **_waiting(wait, seconds))

    def rollback(self, name: str, revision: int, *, wait: bool = False, seconds: int = 60) -> None:
        with _translated():
            self.config.rollback(name, version=revision, **_waiting(wait, seconds))

    def uninstall(self, name: str, *, wait: bool = False, seconds: int = 60) -> None:
        with _translated():
            self.config.uninstall(name, **_waiting(wait, seconds))

    def statuses(self, name: str) -> list[str]:
        with _translated():
            return [str(each["status"]) for each in self.config.history(name)]

    def test(self, name: str, *, seconds: int = 60) -> None:
        from helm_python import _native

        options = json.dumps({"timeout_seconds": seconds})
        with _translated():
            _native.call_string("helm_test_run", self.config._raw(), name, options)


class Helm3:
    def __init__(self, program: Path, kubeconfig: Path, namespace: str) -> None:
        self._command = [str(program), "--kubeconfig", str(kubeconfig), "--namespace", namespace]

    def install(
        self, name: str, values: Mapping[str, Any], *, wait: bool = False, seconds: int = 60
    ) -> None:
        self._apply("install", name, values, wait, seconds)

    def upgrade(
        self, name: str, values: Mapping[str, Any], *, wait: bool = False, seconds: int = 60
    ) -> None:
        self._apply("upgrade", name, values, wait, seconds)

    def rollback(self, name: str, revision: int, *, wait: bool = False, seconds: int = 60) -> None:
        self._run("rollback", name, str(revision), *_wait_flags(wait, seconds))

    def uninstall(self, name: str, *, wait: bool = False, seconds: int = 60) -> None:
        self._run("uninstall", name, *_wait_flags(wait, seconds))

    def statuses(self, name: str) -> list[str]:
        return [each["status"] for each in yaml.safe_load(self._run("history", name, "-o", "yaml"))]

    def test(self, name: str, *, seconds: int = 60) -> None:
        self._run("test", name, f"--timeout={seconds}s")

    def _apply(
        self, verb: str, name: str, values: Mapping[str, Any], wait: bool, seconds: int
    ) -> None:
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            yaml.safe_dump(dict(values), file)
            file.flush()
            self._run(verb, name, str(CHART), "--values", file.name, *_wait_flags(wait, seconds))

    def _run(self, *arguments: str) -> str:
        answer = subprocess.run([*self._command, *arguments], capture_output=True, text=True)
        if answer.returncode:
            raise HelmFailed(answer.stderr.strip())
        return answer.stdout


def _waiting(wait: bool, seconds: int) -> dict[str, Any]:
    return {"timeout": seconds} | ({"wait": "watcher"} if wait else {})


def _wait_flags(wait: bool, seconds: int) -> list[str]:
    return [f"--timeout={seconds}s", *(["--wait"] if wait else [])]


@contextmanager
def _translated() -> Iterator[None]:
    from helm_python import HelmError

    try:
        yield
    except HelmError as error:
        raise HelmFailed(str(error)) from error
