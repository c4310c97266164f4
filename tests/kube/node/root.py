"""Makes a container's file system: an overlay over this machine's file system, in which the pod's
volumes are mounted.

A shell script sets the file system up as root, in its own mount and PID namespaces, and then
executes the container's command as the user that the pod names. The mounts are not visible
elsewhere, and disappear with the container's last process.
"""

import os
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.kube.kinds import Object
from tests.kube.node.volumes import Mount

CHROOT = shutil.which("chroot", path=f"{os.defpath}:/usr/sbin:/sbin") or "chroot"
SHARED_MEMORY = "64m"
"""The size of /dev/shm, which is also the default of container runtimes."""


@dataclass(frozen=True)
class Identity:
    """The user, groups and capabilities of a container."""

    user: int
    group: int
    groups: tuple[int, ...]
    plain: bool
    """Whether the container has no capabilities and can't gain any."""

    @staticmethod
    def of(pod: Object, container: Object) -> "Identity":
        """Read the identity from the security contexts of the pod and the container. Raises
        ValueError if the user would be root although the pod forbids it."""
        above = pod["spec"].get("securityContext") or {}
        own = above | (container.get("securityContext") or {})
        user = int(own.get("runAsUser", 0))
        if own.get("runAsNonRoot") and user == 0:
            raise ValueError("container has runAsNonRoot and image will run as root")
        groups = [*above.get("supplementalGroups", [])]
        groups += [above["fsGroup"]] if "fsGroup" in above else []
        dropped = "ALL" in ((own.get("capabilities") or {}).get("drop") or [])
        return Identity(user, int(own.get("runAsGroup", user)), tuple(groups), dropped)

    def command(self) -> list[str]:
        """Return the command prefix that sets the identity. The parent-death signal is set last,
        since a change of user clears it."""
        groups = ",".join(map(str, self.groups))
        command = ["setpriv", f"--reuid={self.user}", f"--regid={self.group}"]
        command += [f"--groups={groups}" if groups else "--clear-groups"]
        if self.plain:
            command += ["--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]
        return [*command, "--pdeathsig=KILL"]


def script(
    base: Path,
    mounts: Sequence[Mount],
    needs: Sequence[Path],
    identity: Identity,
    command: Sequence[str],
    read_only: bool,
    folder: str,
) -> str:
    """Return the script that is passed to ``sh -c``. ``base`` is an empty folder for the mounts;
    ``folder`` is the working folder in the container."""
    root = base / "root"
    lines = [
        "set -e",
        f"mount -t tmpfs -o size=256m,mode=755 container {base}",
        f"mkdir {base}/upper {base}/work {root}",
        f"mount -t overlay overlay -o lowerdir=/,upperdir={base}/upper,workdir={base}/work {root}",
        f"mount -t proc proc {root}/proc",
        f"mount --rbind /sys {root}/sys",
        f"mount --rbind /dev {root}/dev",
        f"mount -t tmpfs -o size={SHARED_MEMORY},mode=1777 shm {root}/dev/shm",
        *_reachable(root, needs),
    ]
    for mount in mounts:
        lines += _mounted(root, mount)
    lines += _mounted_again(root, mounts, needs)
    if read_only:
        lines.append(f"mount -o remount,ro {root}")
    lines.append(f"cd {root}")
    inner = f"cd {shlex.quote(folder)} && exec {shlex.join([*identity.command(), *command])}"
    lines.append(f"exec {CHROOT} . /bin/sh -c {shlex.quote(inner)}")
    return "\n".join(lines)


def _reachable(root: Path, needs: Sequence[Path]) -> list[str]:
    """Return commands that make the folders in ``needs`` accessible to every user. They open parent
    folders that only root may enter, and mount the folders in ``needs`` that are on other file
    systems."""
    lines, above = [], {parent for path in needs for parent in [path, *path.parents]}
    for parent in sorted(above):
        if not parent.stat().st_mode & 0o001:
            lines.append(f"chmod o+x {root}{parent}")
    here = os.stat("/").st_dev  # noqa: PTH116
    for path in needs:
        if path.stat().st_dev != here:
            lines.append(f"mkdir -p {root}{path} && mount --rbind {path} {root}{path}")
    return lines


def _mounted(root: Path, mount: Mount) -> list[str]:
    inside = Path(mount.path).resolve()  # a symlink, like /var/run, would lead out of root
    path = shlex.quote(f"{root}{inside}")
    if mount.source is None:
        mode = f"size={mount.memory_bytes},mode=2775,gid={mount.group}"
        return [f"mkdir -p {path}", f"mount -t tmpfs -o {mode} memory {path}"]
    source = shlex.quote(str(mount.source))
    if mount.source.is_dir():
        lines = [f"mkdir -p {path}"]
    else:
        parent = shlex.quote(f"{root}{inside.parent}")
        lines = [f"mkdir -p {parent}", f"rm -f {path}", f"touch {path}"]
    lines.append(f"mount --bind {source} {path}")
    if mount.read_only:
        lines.append(f"mount -o remount,bind,ro {path}")
    return lines


def _mounted_again(root: Path, mounts: Sequence[Mount], needs: Sequence[Path]) -> list[str]:
    """A volume may hide folders in ``needs``, such as a checkout below /tmp. Return commands that
    mount the hidden folders again."""
    lines = []
    for path in needs:
        if any(path.is_relative_to(mount.path) for mount in mounts):
            lines.append(f"mkdir -p {root}{path} && mount --rbind {path} {root}{path}")
    return lines
