"""``Conductor.PlaceMany`` over a line: the same messages."""

from functools import partial

from baton.rpc.conductor_service import ConductorCore, answer_all
from baton.rpc.line import Line, parsed
from baton.rpc.line_server import OpenService
from baton.rpc.v1 import conductor_pb2 as pb

CONDUCTOR_SERVICE = "conductor"


class PlaceService:
    """One router's questions: each message is answered at once, by one message."""

    def __init__(self, core: ConductorCore, line: Line) -> None:
        self._core = core
        self._line = line

    def on_message(self, payload: bytes) -> None:
        answers = answer_all(self._core, parsed(pb.PlaceRequests, payload))
        self._line.send_message(answers.SerializeToString())

    def on_lost(self) -> None:
        """A placement holds nothing."""


def conductor_lines(core: ConductorCore) -> dict[str, OpenService]:
    """For :class:`baton.rpc.line_server.LineServer`."""
    return {CONDUCTOR_SERVICE: partial(PlaceService, core)}
