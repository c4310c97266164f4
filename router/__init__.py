"""The router: the HTTP front door of a cluster, with OpenAI's API.

- :func:`~router.app.build_app` puts the HTTP routes together.
- :class:`~router.program.RouterProgram` is one router process.
- ``http`` has the HTTP server, ``openai`` the API, ``tenants`` keys and quotas, ``batches`` the
  batch API, ``generation`` placement, failover and streams, ``telemetry`` metrics and traces,
  ``admin`` the admin API.
"""
