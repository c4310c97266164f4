"""Calls between the programs, over gRPC, framed TCP connections and Unix sockets.

- :func:`~baton.rpc.server.build_server` makes a gRPC server. Modules ``…_service`` have the server
  side of a service, modules ``…_client`` its client side.
- ``framed`` has connections that carry the same messages without the CPU cost of gRPC.
- :class:`~baton.rpc.local_rpc.LocalRpcClient` makes calls within a host over a Unix socket.
- ``convert`` turns protobuf messages into the types of ``baton.core`` and back.
"""
