"""KV transfers and prefix fetches over limited links, by codec; ``benchmarks.codec_handoff`` runs
them.

Each side is a process of its own in a network namespace: :mod:`source` and :mod:`reader` are a
prefill and a decode worker, :mod:`store` and :mod:`fetcher` a store node and a prefill worker of
another host. They answer commands, which are lines of JSON.
"""
