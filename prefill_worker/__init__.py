"""The prefill side of a worker: computing prompts, and offering their KV to others.

- :class:`~prefill_worker.handler.PrefillHandler`: brings a prompt into the engine with the part of
  its prefix that is worth fetching.
- :class:`~prefill_worker.cluster_prefix_store.ClusterPrefixStore`: fetches prefixes from the KV
  store, as :func:`~prefill_worker.reload_policy.choose_reload_mode` decides.
- :class:`~prefill_worker.store_publisher.StorePublisher`: publishes computed blocks to the store.
- :class:`~prefill_worker.kv_exporter.KvExporter`: the requests whose KV other workers import, each
  a :class:`~prefill_worker.kv_export.KvExport`.
- :func:`~prefill_worker.side.open_prefill_side` connects all of these in a worker's process.
"""
