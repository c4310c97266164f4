"""The prefill side of a worker: computing prompts, and offering their KV to other workers.

- :class:`~prefill_worker.handler.PrefillHandler`: adds a prompt to the engine after fetching the
  part of its prefix that is worth fetching.
- :class:`~prefill_worker.cluster_prefix_store.ClusterPrefixStore`: fetches prefixes from the KV
  store, as :func:`~prefill_worker.reload_policy.choose_reload_mode` decides.
- :class:`~prefill_worker.store_publisher.StorePublisher`: publishes computed blocks, those of
  answers included, to the store.
- :class:`~prefill_worker.kv_exporter.KvExporter`: exports the KV of requests to other workers, with
  a :class:`~prefill_worker.kv_export.KvExport` for each request.
- :func:`~prefill_worker.side.open_prefill_side` connects all of these in a worker's process.
"""
