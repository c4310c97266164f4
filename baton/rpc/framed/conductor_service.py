"""``Conductor.PlaceMany`` over a line: the same messages."""

from functools import partial

from baton.rpc.conductor_service import ConductorCore, place_all
from baton.rpc.framed.connection import FramedConnection, parse_message
from baton.rpc.framed.server import FramedServiceFactory
from baton.rpc.v1 import conductor_pb2 as pb

CONDUCTOR_SERVICE = "conductor"


class FramedConductorService:
    """One router's questions: each message is answered at once, by one message."""

    def __init__(self, core: ConductorCore, line: FramedConnection) -> None:
        self._core = core
        self._line = line

    def on_message(self, payload: bytes) -> None:
        answers = place_all(self._core, parse_message(pb.PlaceRequests, payload))
        self._line.send_message(answers.SerializeToString())

    def on_lost(self) -> None:
        """A placement holds nothing."""


def framed_conductor_services(core: ConductorCore) -> dict[str, FramedServiceFactory]:
    """For :class:`baton.rpc.framed.server.FramedServer`."""
    return {CONDUCTOR_SERVICE: partial(FramedConductorService, core)}
