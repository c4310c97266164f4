"""Calls between the programs, over gRPC and over framed connections.

- :mod:`~baton.rpc.service` has the services as tables of methods, from which both are served and
  called. Modules ``…_service`` have the handlers of a service, modules ``…_client`` its clients,
  ``worker_stream`` the client's side of a worker's ``Run``.
- :func:`~baton.rpc.server.build_server` makes a gRPC server.
- ``framed`` has connections over TCP and Unix sockets that carry the same messages without the CPU
  cost of gRPC.
- ``convert`` turns protobuf messages into the types of ``baton.core`` and back. It encodes
  the outputs of workers; :mod:`~baton.rpc.output_encoder` encodes those of mock workers.
"""
