"""Finds a model's folder: a directory, the demo model, or a model of the Hugging Face hub.

A hub model is ``owner/name`` or ``owner/name@REVISION``, where the revision is a branch (``main``
by default), a tag or a commit. A commit that is in the hub's cache is used as it is. For a branch
or a tag, the hub is asked for the newest commit; if that fails, the cached one is used.

``python -m baton.checkpoints.hub ID REVISION SECONDS`` downloads a model into the cache and prints
the result. It is a process of its own because the hub's client sends requests without a timeout,
in threads that can't be stopped.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread

import structlog

from baton.checkpoints.checkpoint import DEMO_MODEL, list_shards, shard_paths
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

_HUB_MODEL = re.compile(r"([\w][\w.-]*/[\w][\w.-]*)(?:@(\w[\w./-]*))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model on the Hugging Face hub."""

    id: str
    revision: str

    @property
    def is_commit(self) -> bool:
        return _COMMIT.fullmatch(self.revision) is not None

    @classmethod
    def parse(cls, model: str) -> "HubModel | None":
        """Parse ``owner/name`` or ``owner/name@REVISION``; return None for any other text."""
        found = _HUB_MODEL.fullmatch(model)
        return None if found is None else cls(found[1], found[2] or "main")


def without_revision(model: str) -> str:
    """Return the id of a hub model, and any other model as it is."""
    hub_model = HubModel.parse(model)
    return model if hub_model is None else hub_model.id


def short_name(model: str) -> str:
    """Return the last part of a model's path or hub id."""
    return Path(without_revision(model)).name


def resolve_model(model: str | Path) -> Path:
    """Return the model's directory. A hub model is downloaded into the hub's cache unless it is
    there. ``demo`` is the model that comes with Baton, unless there is a directory of that name.

    Raises Invalid if ``model`` is neither a directory nor a hub model, and Unavailable if it is not
    in the cache, and the hub can't be reached.
    """
    source = _parse(model)
    return source if isinstance(source, Path) else _resolve_hub_model(source)


def pin_model(model: str) -> str:
    """Return a hub model with its current commit, as ``owner/name@COMMIT``, and any other model as
    it is. Raises the errors of :func:`resolve_model`."""
    source = _parse(model)
    if isinstance(source, Path):
        return model
    commit = _resolve_hub_model(source).name
    log.info("hub_model_pinned", model=source.id, revision=source.revision, commit=commit)
    return f"{source.id}@{commit}"


def _parse(model: str | Path) -> Path | HubModel:
    """Return the model's directory, or what it is called on the hub. Raises Invalid."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if str(model) == "demo":
        return DEMO_MODEL
    hub_model = HubModel.parse(str(model))
    if hub_model is None:
        raise Invalid(
            f"model is {str(model)!r}; it must be a directory or a hub id of the form owner/name, "
            "or owner/name@REVISION"
        )
    return hub_model


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
        folder = _snapshot(model.id, model.revision, is_local=True)
    except (LocalEntryNotFoundError, Invalid):
        return None
    except HFValidationError as error:
        raise Invalid(f"model is {model.id!r}: {error}") from error
    return folder if _has_weights(folder) else None


def _snapshot(model_id: str, revision: str, *, is_local: bool = False) -> Path:
    """Return the folder with the files of a revision that are loaded: those that describe the
    model, and the weights that its index names, or model.safetensors, or, without both of these,
    all. They are downloaded, unless ``is_local``: then LocalEntryNotFoundError is raised if the
    cache has no such revision or not all of these files."""
    from huggingface_hub import snapshot_download

    def fetch(files: Sequence[str], left_out: Sequence[str] = ()) -> Path:
        return Path(
            snapshot_download(
                model_id,
                revision=revision,
                allow_patterns=[*files],
                ignore_patterns=[*left_out],
                local_files_only=is_local,
            )
        )

    folder = fetch(CONFIG_FILES, NOT_LOADED)
    fetch([shard.relative_to(folder).as_posix() for shard in shard_paths(folder)])
    return folder if _has_weights(folder) else fetch(ANY_WEIGHTS, NOT_LOADED)


def _has_weights(folder: Path) -> bool:
    try:
        return bool(list_shards(folder))
    except Invalid:
        has_index = (folder / "model.safetensors.index.json").exists()
        return not has_index and any(each.is_file() for each in folder.glob("*.safetensors"))


def _download(model: HubModel, patience_seconds: float) -> Path:
    """Download a model in a process of its own. Raises Unavailable if that fails, or if the hub
    sends nothing for ``patience_seconds``."""
    arguments = [model.id, model.revision, str(patience_seconds)]
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


def main(hub_id: str, revision: str, seconds: str) -> None:
    """Download a model and print its folder, or why that failed."""
    model, results = HubModel(hub_id, revision), SimpleQueue[dict[str, str]]()
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
    folder = _snapshot(model.id, commit)
    if not _has_weights(folder):
        raise Unavailable("the repository has no weights in safetensors format")
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
