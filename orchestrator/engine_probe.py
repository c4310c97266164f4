"""Checks that the Python interpreter with which workers start their servers has vLLM."""

import subprocess
import sys

from baton.config import Settings
from baton.errors import Invalid

PROBE_SECONDS = 60.0
"""Time within which ``engine_python`` must say whether it has vLLM. It takes a fraction of a
second, since vLLM is not imported."""

PROBE = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"


def probe_vllm(settings: Settings) -> str:
    """Return the Python interpreter that runs the servers. Raises Invalid if it can't be started,
    or has no vLLM."""
    python = settings.engine_python or sys.executable
    try:
        probe = subprocess.run(
            [python, "-c", PROBE], capture_output=True, text=True, timeout=PROBE_SECONDS
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise Invalid(f"engine_python is {python!r}: {error}", param="engine_python") from error
    if probe.returncode:
        raise Invalid(
            f"engine is vllm, but {python} has no vLLM: set engine_python to the Python of an "
            "environment that has it",
            param="engine_python",
        )
    return python
