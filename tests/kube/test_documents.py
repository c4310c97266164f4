"""Tests the commands for Kubernetes in docs/operations.md and docs/kubernetes.md, by running them
one after the other."""

from pathlib import Path

import pytest

from tests.kube.run_document import (
    KUBERNETES_PAGE,
    MissingTool,
    kubernetes_blocks,
    run_kubernetes_page,
)
from tests.run_document import PAGE


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("page", "num_blocks"), [(PAGE, 6), (KUBERNETES_PAGE, 4)], ids=["operations", "kubernetes"]
)
def test_commands_of_the_page_work(page: Path, num_blocks: int) -> None:
    assert len(kubernetes_blocks(page)) == num_blocks
    try:
        assert run_kubernetes_page(page) == ""
    except MissingTool as error:
        pytest.skip(str(error))
