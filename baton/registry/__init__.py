"""The registry of the cluster's members: in Redis, or in memory for tests and simulations.

- :class:`~baton.registry.base.Registry` is the interface;
  :class:`~baton.registry.redis.RedisRegistry` implements it.
- :class:`~baton.registry.heartbeat.Heartbeat` announces this process.
- :class:`~baton.registry.membership.Membership` is a local copy that survives outages of the
  registry.
- :class:`~baton.registry.entry_signing.EntrySigner` signs entries and verifies them.
"""
