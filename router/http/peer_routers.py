"""The other routers of the cluster: what one does not remember, another may."""

import asyncio
import http.client
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import orjson

from baton.core.ids import WorkerId
from baton.core.states import Role
from baton.network.call_signing import MISSING_SECRET, PROOF_HEADER, CallSigner, CallVerifier
from baton.network.pinned_tls import pinned_tls_context
from router.generation.cluster import Cluster
from router.tenants.authentication import unauthorized_error

PEER_HEADER = "x-baton-peer"
"""On a question of another router, which is not passed on."""

PEER_TIMEOUT_SECONDS = 2.0
MAX_PEERS = 64
MAX_ANSWER_BYTES = 4 * 2**20


PURPOSE = "peer"
WRONG_KEY_MESSAGE = (
    "the admin key is missing or wrong: all routers have the same (setting admin_key)"
)


class PeerRouters:
    """By their addresses in the registry, ``own_address`` among them. ``certificate`` is the one of
    all, if they have any. What they ask each other proves that they know the admin key, and does
    not tell it: an address in the registry may be a stranger's."""

    def __init__(
        self,
        own_id: WorkerId,
        own_address: Callable[[], str],
        cluster: Cluster,
        certificate: str | None,
        admin_key: str | None,
    ) -> None:
        self._own_id = own_id
        self._own_address = own_address
        self._cluster = cluster
        self._tls = pinned_tls_context(certificate)
        self._admin_key = admin_key
        self._checker = CallVerifier(admin_key, purpose=PURPOSE) if admin_key else None

    def check(self, path: str, proof: str) -> None:
        """Raises Problem (401) unless the question for ``path`` is another router's."""
        if self._checker is None:
            raise unauthorized_error("this router has no admin key, and another asks with one")
        self._checker.names = {self._own_address()}
        reason = self._checker.refusal(path, [(PROOF_HEADER, proof)])
        if reason:
            raise unauthorized_error(WRONG_KEY_MESSAGE if reason == MISSING_SECRET else reason)

    async def explain(self, request_id: str) -> dict[str, Any] | None:
        """What the first that remembers says. Who does not answer is left out."""
        routers = (each for each in self._cluster.members if each.role is Role.ROUTER)
        addresses = [each.address for each in routers if each.id != self._own_id][:MAX_PEERS]
        path = explain_path(request_id)
        asked = [asyncio.to_thread(self._get, each, path) for each in addresses]
        answers = await asyncio.gather(*asked)
        return next((answer for answer in answers if answer is not None), None)

    def _get(self, address: str, path: str) -> dict[str, Any] | None:
        headers = {PEER_HEADER: "1"}
        if self._admin_key is not None:
            signer = CallSigner(self._admin_key, address, purpose=PURPOSE)
            headers |= dict(signer.metadata(path))
        connection = self._open(address)
        try:
            connection.request("GET", path, headers=headers)
            response = connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                return None
            told = orjson.loads(response.read(MAX_ANSWER_BYTES))
            return told if isinstance(told, dict) else None
        except (OSError, http.client.HTTPException, ValueError):
            return None
        finally:
            connection.close()

    def _open(self, address: str) -> http.client.HTTPConnection:
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        if self._tls is None:
            return http.client.HTTPConnection(host, int(port), timeout=PEER_TIMEOUT_SECONDS)
        return http.client.HTTPSConnection(
            host, int(port), timeout=PEER_TIMEOUT_SECONDS, context=self._tls
        )


def explain_path(request_id: str) -> str:
    return f"/admin/requests/{quote(request_id, safe='')}"
