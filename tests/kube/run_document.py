"""Run the Kubernetes commands in a documentation page, to check that they work.

    python -m tests.kube.run_document [docs/operations.md]

Runs the page's code blocks that are marked ``sh kubernetes`` in order, on the test cluster of
``tests/kube``, which must be run as root. The commands use ``helm`` (Helm 3, installed from an npm
package), ``kubectl`` (which must be installed), ``baton`` (from the environment of the running
Python), ``$NS`` (a namespace), and ``my-values.yaml``, in place of the values that a reader of the
page would write: a KV store, and two decode workers. Exits with 1 if a block fails, and with 2 if
this machine can't run the commands.
"""

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.helm.helm3_parity import HelmUnavailable, fetch_helm3
from tests.kube.cluster import cluster
from tests.kube.node.network import missing_requirement
from tests.run_document import (
    BASH,
    PAGE,
    inherited_environment,
    run_and_report,
    run_blocks,
)

ROOT = Path(__file__).parents[2]
KUBERNETES_PAGE = PAGE.with_name("kubernetes.md")
BLOCK = re.compile(r"^```sh kubernetes\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MY_VALUES = """
pools: {decode: {replicas: 2}}
kvstore:
  enabled: true
  memory: 256Mi
  disk: {size: 1Gi}
  resources: {requests: {memory: 800Mi}, limits: {memory: 1Gi}}
"""


class MissingTool(Exception):
    """Says why this machine can't run the commands."""


def kubernetes_blocks(page: Path) -> list[str]:
    return BLOCK.findall(page.read_text(encoding="utf-8"))


@contextmanager
def working_folder() -> Iterator[Path]:
    """Yield a folder like that of a reader of the page: with ``deploy`` from the repository, and
    ``my-values.yaml``. Its folder ``bin`` has ``helm``. Raises MissingTool."""
    if why := missing_requirement():
        raise MissingTool(f"this machine can't run the nodes of the test cluster: {why}")
    if shutil.which("kubectl") is None:
        raise MissingTool("kubectl is not installed")
    with tempfile.TemporaryDirectory(prefix="baton-") as name:
        folder = Path(name)
        (folder / "bin").mkdir()
        try:
            (folder / "bin/helm").symlink_to(fetch_helm3(folder))
        except HelmUnavailable as error:
            raise MissingTool(f"Helm 3 is not available: {error}") from error
        (folder / "deploy").symlink_to(ROOT / "deploy")
        (folder / "my-values.yaml").write_text(MY_VALUES, encoding="utf-8")
        yield folder


def run_kubernetes_page(page: Path, namespace: str = "models") -> str:
    """Run the page's code blocks; return the block that failed, or an empty string. Raises
    MissingTool."""
    with working_folder() as folder, cluster() as kube:
        programs = [str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
        environment = inherited_environment() | {
            "PATH": os.pathsep.join(programs),
            "KUBECONFIG": str(kube.kubeconfig),
            "NS": namespace,
            "HOME": str(folder),
        }
        blocks = [(block, [*BASH, block]) for block in kubernetes_blocks(page)]
        if failed := run_blocks(blocks, environment, folder):
            print(kube.describe(), file=sys.stderr)
        return failed


def main(arguments: list[str]) -> int:
    try:
        return run_and_report(run_kubernetes_page, arguments)
    except MissingTool as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
