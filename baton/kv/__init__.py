"""Clients of the KV store: the index of which node has which block, and the store nodes.

- :class:`~baton.kv.cluster_store_client.ClusterStoreClient` finds, reads and writes blocks on all
  store nodes.
- :class:`~baton.kv.index.KvIndex` is the interface of the index;
  :class:`~baton.kv.redis_index.RedisKvIndex` implements it.
- :class:`~baton.kv.circuit_breaker.StoreCircuitBreaker` spares requests the wait for a store node
  that fails.
"""
