"""The KV store node, which caches KV blocks in DRAM and on SSD.

- :class:`~kvstore.node.StoreNode` serves workers: puts, leases for reads, pins.
- :class:`~kvstore.tiered_store.TieredStore` keeps blocks in a :class:`~kvstore.dram_tier.DramTier`
  and a :class:`~kvstore.disk_tier.DiskTier`.
- :class:`~kvstore.demoter.Demoter` moves blocks from DRAM to the SSD in the background.
- :class:`~baton.kv.event_log.EventLog` numbers the changes, which conductors watch.
- :class:`~kvstore.program.KvStoreProgram` is one store process.
"""
