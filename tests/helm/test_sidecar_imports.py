"""Tests what the process of an attached worker imports: its image has little else."""

import json
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.lock import LOCKS, SIDECAR, parse_lock

ROOT = Path(__file__).parents[2]
IMPORT = """
import importlib.metadata, json, re, sys
from importlib.abc import MetaPathFinder

installed = {*json.loads(sys.argv[1]), "baton"}
owners = {name: {re.sub("[-_.]+", "-", each).lower() for each in found}
          for name, found in importlib.metadata.packages_distributions().items()}

class Hiding(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if owners.get(name.partition(".")[0], installed).isdisjoint(installed):
            raise ModuleNotFoundError(f"{name} is not in the image", name=name)

sys.meta_path.insert(0, Hiding())
import baton.__main__, command_line.main, uvloop
import command_line.serve
import command_line.worker_program, attached_worker.program
imported = {name.partition(".")[0] for name in sys.modules}
print(json.dumps([*imported, *(each for name in imported for each in owners.get(name, ()))]))
"""


def test_an_attached_worker_imports_only_what_the_sidecar_image_has() -> None:
    """The imports succeed where no other packages can be imported than those of the image, and they
    need all of these but the hub's client, which is imported when a model comes from the hub."""
    lock = parse_lock((LOCKS / "sidecar.txt").read_text())
    installed = sorted({canonicalize_name(Requirement(each).name) for each in lock})
    done = subprocess.run(
        [sys.executable, "-c", IMPORT, json.dumps(installed)],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    imported = set(json.loads(done.stdout))
    assert imported.isdisjoint({"torch", "vllm", "transformers", "nixl"})
    assert set(SIDECAR) - imported == {"huggingface-hub"}
