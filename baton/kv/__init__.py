"""Clients of the KV store's nodes, and of the index, which says which node has which block.

- :class:`~baton.kv.cluster_store_client.ClusterStoreClient` finds, reads and writes blocks on all
  store nodes.
- :class:`~baton.kv.index.KvIndex` is the interface of the index;
  :class:`~baton.kv.redis_index.RedisKvIndex` implements it.
- :class:`~baton.kv.circuit_breaker.StoreCircuitBreaker` keeps requests from waiting for a store
  node that fails.
"""
