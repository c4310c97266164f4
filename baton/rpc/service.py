"""The services of Baton's programs, as tables of methods that are read from the .proto files. gRPC
(:mod:`baton.rpc.server`, :mod:`baton.rpc.channel`) and framed connections
(:mod:`baton.rpc.framed.calls`) serve and call them from the same tables."""

import re
from dataclasses import dataclass

from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from baton.rpc.v1 import conductor_pb2, kvstore_pb2, worker_pb2


@dataclass(frozen=True, slots=True)
class Method:
    """One method. ``path`` is its name in gRPC; ``handler`` is the name of the function that serves
    it: ``report_damaged`` for ReportDamaged. ``number`` is its position in the .proto file."""

    name: str
    path: str
    handler: str
    number: int
    request_type: type[Message]
    response_type: type[Message]
    has_request_stream: bool
    has_response_stream: bool

    @property
    def is_unary(self) -> bool:
        return not (self.has_request_stream or self.has_response_stream)


class Service:
    """A service. ``name`` is its name on framed connections; ``methods`` are keyed by name."""

    def __init__(self, descriptor: ServiceDescriptor) -> None:
        self.name = descriptor.name.lower()
        self.full_name = descriptor.full_name
        self.methods = {each.name: _method(each) for each in descriptor.methods}


def _method(descriptor: MethodDescriptor) -> Method:
    return Method(
        descriptor.name,
        f"/{descriptor.containing_service.full_name}/{descriptor.name}",
        re.sub(r"(?<!^)(?=[A-Z])", "_", descriptor.name).lower(),
        descriptor.index,
        GetMessageClass(descriptor.input_type),
        GetMessageClass(descriptor.output_type),
        descriptor.client_streaming,
        descriptor.server_streaming,
    )


WORKER = Service(worker_pb2.DESCRIPTOR.services_by_name["Worker"])
CONDUCTOR = Service(conductor_pb2.DESCRIPTOR.services_by_name["Conductor"])
KV_STORE = Service(kvstore_pb2.DESCRIPTOR.services_by_name["KvStore"])
