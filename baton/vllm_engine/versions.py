"""The versions of vLLM that Baton runs."""

import sys
from importlib.metadata import PackageNotFoundError, version

from baton.errors import Invalid

KNOWN_VERSIONS = ("0.32.0",)
"""The interfaces between vLLM's scheduler and its workers change between releases, so a version is
listed here once ``make test-vllm`` has passed with it."""


def check_vllm_version() -> str:
    """Return the version of the installed vLLM. Raises Invalid if vLLM is missing, or its version
    is not one that Baton was tested with."""
    try:
        installed = version("vllm")
    except PackageNotFoundError as error:
        raise Invalid(
            "engine is vllm, but this Python has no vLLM: set engine_python to the interpreter of "
            "an environment that has it (`make setup-vllm` creates .venv-vllm)",
            param="engine_python",
        ) from error
    release = installed.partition("+")[0]
    if release not in KNOWN_VERSIONS:
        raise Invalid(
            f"vLLM {installed} is installed, but this version of Baton supports only "
            f"{', '.join(KNOWN_VERSIONS)}",
            param="engine",
        )
    return release


if __name__ == "__main__":
    try:
        check_vllm_version()
    except Invalid as error:
        sys.exit(str(error))
