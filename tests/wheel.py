"""Builds Baton's wheel as its images do, and installs it."""

import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCKERFILE = (ROOT / "deploy/docker/Dockerfile").read_text()
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


def copied() -> set[str]:
    """Return the paths that the Dockerfile copies to build the wheel."""
    stage = DOCKERFILE.split("AS wheel")[1].split("FROM")[0]
    lines = re.findall(r"^COPY (.+) \S+$", stage, flags=re.MULTILINE)
    return {name for line in lines for name in line.split()}


def build_wheel(folder: Path) -> Path:
    """Build the wheel in ``folder``, only from what the Dockerfile copies."""
    source, out = folder / "source", folder / "wheel"
    source.mkdir()
    for name in copied():
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, source)
    command = [sys.executable, "-c", BUILD, str(out)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=100)
    (built,) = out.glob("*.whl")
    return built


def install(wheel: Path, environment: Path) -> tuple[Path, Path]:
    """Install the wheel in a new virtual environment that has this one's packages, too. Return its
    interpreter, and the folder of its packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    paths = {"base": str(environment), "platbase": str(environment)}
    site = Path(sysconfig.get_path("purelib", "venv", paths))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return environment / "bin/python", site
