"""Checks that the Python interpreter that runs the workers has a vLLM that Baton supports."""

import subprocess

from baton.config import Settings
from baton.errors import Invalid
from baton.system.python_process import python_command

PROBE_SECONDS = 60.0
"""Time within which ``engine_python`` must say which vLLM it has. It takes about a second."""


def probe_vllm(settings: Settings) -> str:
    """Return the Python interpreter that runs the workers. Raises Invalid if it can't be started,
    has no vLLM, or has a version of vLLM that Baton was not tested with."""
    own_python, *arguments = python_command("baton.vllm_engine.versions")
    python = settings.engine_python or own_python
    try:
        probe = subprocess.run(
            [python, *arguments],
            capture_output=True,
            text=True,
            timeout=PROBE_SECONDS,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise Invalid(f"engine_python is {python!r}: {error}", param="engine_python") from error
    if probe.returncode:
        reason = (probe.stderr or probe.stdout).strip().splitlines()[-1:]
        raise Invalid(reason[0] if reason else f"{python} failed", param="engine_python")
    return python
