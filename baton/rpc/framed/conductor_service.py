"""``Conductor.PlaceMany`` over a framed connection, with the same messages as over gRPC."""

from functools import partial

from baton.rpc.conductor_service import ConductorCore, place_all
from baton.rpc.framed.connection import FramedConnection, parse_message
from baton.rpc.framed.server import FramedServiceFactory
from baton.rpc.v1 import conductor_pb2 as pb

CONDUCTOR_SERVICE = "conductor"


class FramedConductorService:
    """Answers the placement requests of one router. Each message is answered at once, with one
    message."""

    def __init__(self, core: ConductorCore, connection: FramedConnection) -> None:
        self._core = core
        self._connection = connection

    def on_message(self, payload: bytes) -> None:
        answers = place_all(self._core, parse_message(pb.PlaceRequests, payload))
        self._connection.send_message(answers.SerializeToString())

    def on_lost(self) -> None:
        """Do nothing: placements need no cleanup."""


def framed_conductor_services(core: ConductorCore) -> dict[str, FramedServiceFactory]:
    """Return the conductor's services, for :class:`baton.rpc.framed.server.FramedServer`."""
    return {CONDUCTOR_SERVICE: partial(FramedConductorService, core)}
