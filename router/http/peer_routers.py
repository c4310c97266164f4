"""The other routers of the cluster, which may have the record of a request that this router
lacks."""

import asyncio
import http.client
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import orjson

from baton.core.ids import WorkerId
from baton.core.states import Role
from baton.network.call_signing import MISSING_SECRET_ERROR, PROOF_HEADER, CallSigner, CallVerifier
from baton.network.pinned_tls import pinned_tls_context
from router.generation.cluster import Cluster
from router.limits import MAX_PEER_ANSWER_BYTES, MAX_PEER_ROUTERS
from router.tenants.authentication import unauthorized_error

PEER_HEADER = "x-baton-peer"
"""A query with this header comes from another router, and is not forwarded again."""

PEER_TIMEOUT_SECONDS = 2.0


PURPOSE = "peer"
WRONG_KEY_MESSAGE = (
    "the admin key is missing or wrong; all routers must have the same one (setting admin_key)"
)


class PeerRouters:
    """Queries the other routers in the registry. ``certificate`` is the TLS certificate that all
    routers share, or None without TLS. A query is signed with the admin key but does not contain
    it, since an address in the registry may belong to an attacker."""

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
        self._verifier = CallVerifier(admin_key, purpose=PURPOSE) if admin_key else None

    def check(self, path: str, proof: str) -> None:
        """Raise ApiError (401) unless the query for ``path`` is signed by another router."""
        if self._verifier is None:
            raise unauthorized_error("this router lacks the admin key that the querying router has")
        self._verifier.own_addresses = {self._own_address()}
        reason = self._verifier.refusal(path, [(PROOF_HEADER, proof)])
        if reason:
            raise unauthorized_error(
                WRONG_KEY_MESSAGE if reason == MISSING_SECRET_ERROR else reason
            )

    async def explain(self, request_id: str) -> dict[str, Any] | None:
        """Return the record of a request from the first router that has one, or None if no router
        has one. Routers that don't answer are skipped."""
        routers = (each for each in self._cluster.members if each.role is Role.ROUTER)
        addresses = [each.address for each in routers if each.id != self._own_id][:MAX_PEER_ROUTERS]
        path = explain_path(request_id)
        calls = [asyncio.to_thread(self._get, each, path) for each in addresses]
        answers = await asyncio.gather(*calls)
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
            answer = orjson.loads(response.read(MAX_PEER_ANSWER_BYTES))
            return answer if isinstance(answer, dict) else None
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
