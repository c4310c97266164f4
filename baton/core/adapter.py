"""The identity of a LoRA adapter: what requests, workers and the registry call it by."""

import re
from dataclasses import dataclass

ADAPTER_DIGEST_BYTES = 16
MAX_ADAPTER_NAME = 128
MAX_ADAPTERS = 64
"""Maximum number of adapters of a worker, since a worker announces each of them with every
heartbeat, in up to 400 bytes."""

MAX_ADAPTER_ERROR = 200
"""Maximum length, in characters, of the reason why an adapter could not be loaded."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/@+-]*")


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """An adapter's name, and the digest of its configuration and weights (16 bytes).

    Clients know an adapter by its name, which may stand for other weights later. Workers and block
    keys know it by its digest.
    """

    name: str
    digest: bytes


def is_adapter_name(name: str) -> bool:
    """Whether ``name`` can be the name of an adapter: at most ``MAX_ADAPTER_NAME`` letters, digits
    and characters of ``_.:/@+-``, beginning with a letter, a digit or ``_``."""
    return len(name) <= MAX_ADAPTER_NAME and _NAME.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class AdapterEntry:
    """An adapter that the cluster is to serve, as stored in the registry. ``path`` is its folder,
    which every worker must be able to read under this path; ``model`` is the name of its base
    model."""

    name: str
    path: str
    digest: bytes
    model: str

    @property
    def ref(self) -> AdapterRef:
        return AdapterRef(self.name, self.digest)


@dataclass(frozen=True, slots=True)
class WorkerAdapter:
    """An adapter as a worker announces it: loaded, or not loadable, with the reason in ``error``.
    ``in_settings`` says that it is in the worker's settings, so that it exists although it is not
    in the registry."""

    name: str
    digest: bytes
    error: str = ""
    in_settings: bool = False
