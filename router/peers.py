"""The other routers of the cluster: what one does not remember, another may."""

import asyncio
import http.client
from typing import Any
from urllib.parse import quote

import orjson

from baton.core.ids import WorkerId
from baton.core.states import Role
from baton.runtime.pinned import pinned
from router.cluster import Cluster

ASKED_BY_PEER = "x-baton-peer"
"""On a question of another router, which is not passed on."""

PEER_SECONDS = 2.0
MAX_PEERS = 64
MAX_ANSWER_BYTES = 4 * 2**20


class Peers:
    """By their addresses in the registry. ``certificate`` is the one of all, if they have any."""

    def __init__(self, own_id: WorkerId, cluster: Cluster, certificate: str | None) -> None:
        self._own_id = own_id
        self._cluster = cluster
        self._tls = pinned(certificate)

    async def explain(self, request_id: str, authorization: str | None) -> dict[str, Any] | None:
        """What the first that remembers says. Who does not answer is left out."""
        routers = (each for each in self._cluster.members if each.role is Role.ROUTER)
        addresses = [each.address for each in routers if each.id != self._own_id][:MAX_PEERS]
        path = f"/admin/requests/{quote(request_id, safe='')}"
        asked = [asyncio.to_thread(self._get, each, path, authorization) for each in addresses]
        answers = await asyncio.gather(*asked)
        return next((answer for answer in answers if answer is not None), None)

    def _get(self, address: str, path: str, authorization: str | None) -> dict[str, Any] | None:
        headers = {ASKED_BY_PEER: "1"}
        if authorization is not None:
            headers["authorization"] = authorization
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
            return http.client.HTTPConnection(host, int(port), timeout=PEER_SECONDS)
        return http.client.HTTPSConnection(host, int(port), timeout=PEER_SECONDS, context=self._tls)
