"""KV transports between processes, over shared memory, NIXL or gRPC. They don't need torch.

- :class:`~baton.transport.base.Transport` is the interface, with its guarantees.
- :class:`~baton.transport.shm.ShmTransport` maps the peer's memory;
  :class:`~baton.transport.nixl.NixlTransport` and
  :class:`~baton.transport.grpc_transport.GrpcTransport` cross hosts.
- :func:`~baton.transport.selection.open_transports` opens the transports that a process can serve,
  and :func:`~baton.transport.selection.choose_transport` chooses one for two peers.
- :class:`~baton.transport.unfinished_transfers.UnfinishedTransfers` waits for the end of transfers
  that could not be released.
"""
