"""Calls between the programs, over gRPC, framed TCP connections and Unix sockets.

- :func:`~baton.rpc.server.build_server` makes a gRPC server; ``…_service`` modules are servers'
  sides, ``…_client`` modules clients' sides.
- ``framed`` has connections that carry the same messages without gRPC's cost.
- :class:`~baton.rpc.local_rpc.LocalRpcClient` makes calls within a host over a Unix socket.
- ``convert`` turns protobuf messages into the types of ``baton.core`` and back.
"""
