"""Runs a module in Triton's interpreter."""

import os
import subprocess
import sys


def run_interpreted(module: str) -> list[str]:
    """Run ``python -m MODULE`` in Triton's interpreter; return the lines that it prints. It runs
    in its own process, since the interpreter is selected when Triton is imported."""
    done = subprocess.run(
        [sys.executable, "-m", module],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    return done.stdout.splitlines()
