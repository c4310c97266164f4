"""Checks attached servers from outside, before anything is served."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from attached_worker.http_exchange import parse_address
from attached_worker.program import check_role, has_weights_here, weights_digest
from attached_worker.server import ServerFacts
from attached_worker.vllm_server import VllmServer
from baton.checkpoints.hub import resolve_model, short_name
from baton.config import Settings
from baton.core.states import Role
from baton.errors import BatonError, Invalid, Unavailable


@dataclass(frozen=True, slots=True)
class ServerReport:
    """``advice`` says what the server lacks that would be useful. ``error`` is Unavailable if the
    server does not respond, and Invalid if it can't be used as it was started."""

    url: str
    facts: ServerFacts | None = None
    advice: tuple[str, ...] = ()
    error: BatonError | None = None

    def describe(self) -> str:
        """Describe the server in a line. Raises its error."""
        facts, error = self.facts, self.error
        if error is not None or facts is None:
            raise error or Unavailable(self.url)
        return (
            f"{facts.software} {facts.version}, {facts.model} from {facts.weights}, "
            f"{facts.num_blocks} blocks of {facts.block_tokens} tokens, "
            f"{facts.max_model_tokens} tokens at most; it offers {', '.join(facts.paths)}"
        )


def check_servers(settings: Settings) -> list[ServerReport]:
    """Check the servers in ``attach``. Not for the thread of an event loop. Raises Unavailable if
    the model can't be downloaded."""
    if not settings.attach:
        return []
    folder = resolve_model(settings.model)
    return asyncio.run(_check_all(settings.attach, settings.model, folder))


async def _check_all(attach: Sequence[str], model: str, folder: Path) -> list[ServerReport]:
    servers = [each.partition("=") for each in attach]
    return await asyncio.gather(
        *[_check(Role(pool), url, model, folder) for pool, _, url in servers]
    )


async def _check(role: Role, url: str, model: str, folder: Path) -> ServerReport:
    server, facts = VllmServer(parse_address(url)), None
    try:
        facts = await server.describe()
        try:
            check_role(facts, role)
            await asyncio.to_thread(weights_digest, facts, folder)
        except Invalid as error:
            raise Invalid(f"{url}: {error}") from error
        advice = (*_doubts(facts, model), *await server.advise(facts))
        return ServerReport(url, facts, advice)
    except BatonError as error:
        return ServerReport(url, facts, error=error)


def _doubts(facts: ServerFacts, model: str) -> list[str]:
    """Say that the server may have loaded another model than the cluster's, if it looks so and the
    weights can't be compared."""
    if has_weights_here(facts) or short_name(facts.weights) == short_name(model):
        return []
    return [
        f"it has loaded {facts.weights}, which can't be compared with the cluster's model, "
        f"{model}: unless they are the same, answers are wrong; name the server's as model "
        "(--model)"
    ]
