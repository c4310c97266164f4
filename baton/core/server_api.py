"""What the server of an attached worker offers beyond tokens: routes of its own API, to which
routers forward requests whole."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

COMPLETIONS = "/v1/completions"
CHATS = "/v1/chat/completions"

FORWARDED_HEADERS = frozenset({"content-type", "content-length", "metadata"})
"""The headers of a server's answer that are passed on; ``metadata`` describes embeddings in binary
form."""


@dataclass(frozen=True, slots=True)
class ServerRoute:
    """A route that the router has only for servers that offer it. ``name`` is its label in metrics;
    ``is_form`` says that bodies are multipart forms, and not JSON."""

    name: str
    is_form: bool = False


SERVER_ROUTES: Mapping[str, ServerRoute] = MappingProxyType(
    {
        "/v1/embeddings": ServerRoute("embeddings"),
        "/v2/embed": ServerRoute("embeddings"),
        "/pooling": ServerRoute("pooling"),
        "/classify": ServerRoute("classify"),
        "/score": ServerRoute("score"),
        "/v1/score": ServerRoute("score"),
        "/rerank": ServerRoute("rerank"),
        "/v1/rerank": ServerRoute("rerank"),
        "/v2/rerank": ServerRoute("rerank"),
        "/v1/audio/transcriptions": ServerRoute("transcriptions", is_form=True),
        "/v1/audio/translations": ServerRoute("translations", is_form=True),
    }
)
"""The routes by path; they are vLLM's."""

KNOWN_PATHS = (COMPLETIONS, CHATS, *SERVER_ROUTES)
"""All paths of a server that matter to Baton."""


@dataclass(frozen=True, slots=True)
class ServerApi:
    """The API of a worker's server. ``model`` is the server's name for its model, and ``paths`` are
    those of :data:`KNOWN_PATHS` that it offers. Both are empty if no server is attached."""

    model: str = ""
    paths: tuple[str, ...] = ()

    @property
    def generates(self) -> bool:
        """Whether the worker generates tokens."""
        return not self.model or COMPLETIONS in self.paths


@dataclass(frozen=True, slots=True)
class ForwardRequest:
    """A request to a server's API. ``num_tokens`` is an estimate of its size, for the worker's
    load."""

    request_id: str
    path: str
    content_type: str
    body: bytes = field(repr=False)
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ForwardedHead:
    """The beginning of a server's answer. ``headers`` are some of :data:`FORWARDED_HEADERS`."""

    status: int
    headers: Mapping[str, str]


def hashed_salt(salt: bytes) -> str:
    """Return what the server gets in the place of a tenant's salt, which its KV events would show
    in plain text."""
    return hashlib.blake2b(salt, digest_size=16, person=b"baton.attached").hexdigest()
