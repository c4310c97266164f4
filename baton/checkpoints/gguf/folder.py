"""Describes a GGUF file by a folder in the cache, which the rest of Baton reads like the folder of
any other model: config.json, generation_config.json, tokenizer.json, tokenizer_config.json,
``model.gguf.json`` with the list of tensors, and ``model.gguf``, a link to the file."""

import hashlib
import json
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import structlog

from baton.checkpoints.checkpoint import GGUF_INDEX, GGUF_WEIGHTS, file_samples
from baton.errors import BatonError, Invalid, Unavailable
from baton.system.home_folder import require_home

CONVERSION = 3
"""Part of a folder's name. To be increased when the folder of the same file changes."""

log = structlog.get_logger(__name__)


def gguf_folder(file: Path, sampling: Mapping[str, float] = MappingProxyType({})) -> Path:
    """Return the folder that describes ``file``; it is made if the cache does not have it, which
    takes a few seconds. ``sampling`` are the model's own sampling parameters, by their names in
    generation_config.json, where the file has none. Raises Invalid if the file is damaged or not
    supported, and Unavailable if the cache can't be written."""
    file = file.resolve()
    folder = _cache() / f"{file.stem}-{_digest(file, sampling)}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if not folder.is_dir():
            _write(file, folder, sampling)
        _link(file, folder / GGUF_WEIGHTS)
    except OSError as error:
        raise Unavailable(
            f"the folder that describes {file} can't be written: {error}; set HF_HUB_CACHE to a "
            "folder that can"
        ) from error
    return folder


def _write(file: Path, folder: Path, sampling: Mapping[str, float]) -> None:
    """Write the folder as a whole: other processes may look for it, or write it as well."""
    contents = _describe(file, sampling)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".new-") as new:
        for name, text in contents.items():
            (Path(new) / name).write_text(text, "utf-8")
        Path(new).chmod(0o755)
        with suppress(OSError):  # another process was faster, and its folder is the same
            Path(new).rename(folder)
            Path(new).mkdir()
    log.info("gguf_described", file=str(file), folder=str(folder))


def _describe(file: Path, sampling: Mapping[str, float]) -> dict[str, str]:
    """Return the contents of the folder's files."""
    from baton.checkpoints.gguf.metadata import GgufFile
    from baton.checkpoints.gguf.model_config import generation_config, model_config
    from baton.checkpoints.gguf.tensors import list_tensors
    from baton.checkpoints.gguf.vocabulary import make_tokenizer, tokenizer_config

    opened = GgufFile(file)
    try:
        contents: dict[str, dict[str, Any]] = {
            "config.json": model_config(opened),
            "generation_config.json": {**sampling, **generation_config(opened)},
            "tokenizer_config.json": tokenizer_config(opened),
            GGUF_INDEX: list_tensors(opened),
        }
        tokenizer = make_tokenizer(opened).to_str()
    except BatonError:
        raise
    # Values of a wrong type or size lead to whatever the code above and its libraries raise.
    except Exception as error:
        raise Invalid(f"{file}: the file contradicts itself: {error!r}") from error
    texts = {name: json.dumps(content, indent=1) for name, content in contents.items()}
    return {**texts, "tokenizer.json": tokenizer}


def _link(file: Path, link: Path) -> None:
    """Let ``link`` lead to the file, which may have moved since the folder was made."""
    if link.resolve() == file:
        return
    new = link.with_name(f".{link.name}.{hashlib.blake2b(str(file).encode()).hexdigest()[:8]}")
    new.unlink(missing_ok=True)
    new.symlink_to(file)
    new.replace(link)


def _digest(file: Path, sampling: Mapping[str, float]) -> str:
    """Return a digest of the file's size and evenly spaced samples of it, and of how it is
    converted."""
    size = file.stat().st_size
    start = f"{CONVERSION}:{size}:{json.dumps(dict(sampling), sort_keys=True)}"
    digest = hashlib.blake2b(start.encode(), digest_size=8, person=b"baton.gguf")
    for sample in file_samples(file):
        digest.update(sample)
    return digest.hexdigest()


def _cache() -> Path:
    """Return the folder for such folders, in the hub's cache (HF_HUB_CACHE)."""
    from huggingface_hub import constants

    if constants.HF_HUB_CACHE.startswith("~"):  # it is in the home folder, and there is none
        require_home()
    return Path(constants.HF_HUB_CACHE) / ".baton-gguf"
