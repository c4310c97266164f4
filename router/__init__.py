"""The router, which serves OpenAI's API over HTTP and runs requests on the cluster's workers.

- :func:`~router.app.build_app` builds the HTTP routes.
- :class:`~router.program.RouterProgram` is one router process.
- The packages are ``http`` (the HTTP server), ``serving`` (what all APIs share, from the head of a
  request to the encoder), ``openai``, ``responses`` and ``anthropic`` (the APIs), ``tenants`` (keys
  and quotas), ``batches`` (the batch API), ``generation`` (placement, failover and streams),
  ``telemetry`` (metrics and traces), ``admin`` (the admin API), ``api_document`` (the OpenAPI
  document) and ``console`` (the web page at ``/ui``).
"""
