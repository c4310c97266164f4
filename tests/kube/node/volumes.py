"""Creates a folder for each volume of a pod, so that the pod's containers can mount it."""

import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.kube.api import Api
from tests.kube.kinds import CONFIG_MAP, SECRET, Object
from tests.kube.node.environment import Missing, contents, field
from tests.kube.quantities import quantity

ACCOUNT_FOLDER = "/var/run/secrets/kubernetes.io/serviceaccount"
WORLD = 0o777


@dataclass(frozen=True)
class Mount:
    """A mount of ``source`` at ``path``. If ``source`` is None, an in-memory file system of
    ``memory_bytes`` that belongs to the group ``group`` is mounted."""

    path: str
    source: Path | None
    read_only: bool = False
    memory_bytes: int = 0
    group: int = 0


class Volumes:
    """The volumes of one pod. ``claims`` is the parent folder of all volume claims; ``token`` is
    the token of the pod's service account."""

    def __init__(self, api: Api, pod: Object, folder: Path, claims: Path, token: str) -> None:
        self._token = token
        self._api = api
        self._pod = pod
        self._folder = folder
        self._claims = claims
        self._namespace = pod["metadata"]["namespace"]
        self._group = int((pod["spec"].get("securityContext") or {}).get("fsGroup", 0))
        self._specs = {each["name"]: each for each in pod["spec"].get("volumes") or []}
        self._written: dict[Path, dict[str, bytes]] = {}
        self._num_versions = 0

    def make(self) -> None:
        """Create and fill the volumes' folders. Raises Missing if an object, key or host path
        to which a volume refers doesn't exist, or if the type of a volume is not supported."""
        for name, spec in self._specs.items():
            self._fill(self._folder / name, spec)

    def refresh(self) -> None:
        """Rewrite the files of those volumes whose ConfigMap or Secret has changed. Containers see
        the new files, except for files that they mount by a ``subPath``. If the ConfigMap or Secret
        is gone, the files stay as they are."""
        for name, spec in self._specs.items():
            if {"configMap", "secret", "projected"} & spec.keys():
                with suppress(Missing):
                    self._fill(self._folder / name, spec)

    def mounts(self, container: Object) -> list[Mount]:
        """Return a container's mounts, outer folders first."""
        mounts = [self._mount(each) for each in container.get("volumeMounts") or []]
        return sorted(mounts, key=lambda mount: mount.path.rstrip("/").count("/"))

    def _mount(self, mount: Object) -> Mount:
        spec, path = self._specs[mount["name"]], mount["mountPath"]
        empty = spec.get("emptyDir")
        if empty is not None and empty.get("medium") == "Memory" and self._alone(mount["name"]):
            size = int(quantity(empty.get("sizeLimit", "64Mi")))
            return Mount(path, None, False, size, self._group)
        source = self._source(spec)
        if mount.get("subPath"):
            source = source / mount["subPath"]
            if not source.exists():
                source.mkdir(parents=True)
        kept = ("configMap", "secret", "projected", "downwardAPI")
        read_only = bool(mount.get("readOnly")) or any(name in spec for name in kept)
        return Mount(path, source, read_only)

    def _alone(self, name: str) -> bool:
        """Return whether only one container mounts the volume. An in-memory file system can't be
        shared, since each container would get an empty one of its own."""
        users = [
            container["name"]
            for container in self._pod["spec"]["containers"]
            if any(each["name"] == name for each in container.get("volumeMounts") or [])
        ]
        return len(users) == 1

    def _source(self, spec: Object) -> Path:
        if "persistentVolumeClaim" in spec:
            return self._claims / f"{self._namespace}.{spec['persistentVolumeClaim']['claimName']}"
        if "hostPath" in spec:
            return Path(spec["hostPath"]["path"])
        return self._folder / str(spec["name"])

    def _fill(self, folder: Path, spec: Object) -> None:
        if "hostPath" in spec:
            if not self._source(spec).exists():
                raise Missing(f"hostPath {self._source(spec)} does not exist")
        elif "configMap" in spec or "secret" in spec:
            kind = "configMap" if "configMap" in spec else "secret"
            self._write(folder, self._files(kind, spec[kind]), spec[kind].get("defaultMode", 0o644))
        elif "projected" in spec:
            files: dict[str, bytes] = {}
            for source in spec["projected"].get("sources") or []:
                kind, projection = next(iter(source.items()))
                files |= self._files(kind, projection)
            self._write(folder, files, spec["projected"].get("defaultMode", 0o644))
        elif "downwardAPI" in spec:
            self._write(folder, self._files("downwardAPI", spec["downwardAPI"]), 0o644)
        elif "emptyDir" in spec or "persistentVolumeClaim" in spec:
            self._open(self._source(spec))
        else:
            raise Missing(f"this kubelet does not support volumes with the fields {sorted(spec)}")

    def _files(self, kind: str, source: Object) -> dict[str, bytes]:
        if kind == "downwardAPI":
            return {
                item["path"]: field(self._pod, item["fieldRef"]["fieldPath"]).encode()
                for item in source.get("items") or []
            }
        if kind == "serviceAccountToken":
            return {source["path"]: self._token.encode()}
        data = contents(self._api, CONFIG_MAP if kind == "configMap" else SECRET,
                        self._namespace, source)  # fmt: skip
        if not source.get("items"):
            return data
        for item in source["items"]:
            if item["key"] not in data:
                raise Missing(f"a volume references non-existent config key: {item['key']}")
        return {item["path"]: data[item["key"]] for item in source["items"]}

    def _write(self, folder: Path, files: dict[str, bytes], mode: int) -> None:
        """Write a volume's files as a kubelet does, so that all of them change at once: each file
        is a link to a file in ``..data``, which is itself a link to the folder of the current
        version."""
        if self._written.get(folder) == files:
            return
        self._num_versions += 1
        version, data = folder / f"..{self._num_versions}", folder / "..data"
        self._write_version(version, files, mode)
        old = data.resolve() if data.exists() else None
        (folder / "..data_tmp").symlink_to(version.name)
        (folder / "..data_tmp").replace(data)
        names = {name.partition("/")[0] for name in files}
        for link in (each for each in folder.iterdir() if not each.name.startswith("..")):
            if link.name not in names:
                link.unlink()
        for name in names:
            if not (folder / name).is_symlink():
                (folder / name).symlink_to(f"..data/{name}")
        if old is not None:
            shutil.rmtree(old)
        self._written[folder] = files

    def _write_version(self, version: Path, files: dict[str, bytes], mode: int) -> None:
        version.mkdir(parents=True, mode=0o755)
        for name, value in files.items():
            path = version / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(value)
            os.chown(path, 0, self._group)
            path.chmod(mode | (0o040 if self._group else 0))

    def _open(self, folder: Path) -> None:
        """Create a folder that the pod's users and group can write to."""
        if not folder.exists():
            folder.mkdir(parents=True)
        os.chown(folder, 0, self._group)
        folder.chmod(0o2775 if self._group else WORLD)


def account_files(folder: Path, token: str, namespace: str, authority: bytes) -> Mount:
    """Write the files that Kubernetes clients expect for a service account; return their mount."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "token").write_text(token, encoding="utf-8")
    (folder / "namespace").write_text(namespace, encoding="utf-8")
    (folder / "ca.crt").write_bytes(authority)
    return Mount(ACCOUNT_FOLDER, folder, True)
