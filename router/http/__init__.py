"""The HTTP server, with a bound on everything that a client can send or leave unread.

- :class:`~router.http.server.HttpServer` accepts connections on listening sockets.
- :class:`~router.http.connection.HttpConnection` parses the requests of one connection, within the
  limits of :class:`~router.http.connection_limits.ConnectionLimits`.
- :class:`~router.http.frontend.HttpFrontend` routes a request, and adds its id, CORS headers and
  the access log.
- :class:`~router.http.raw_body.RawBody` collects a body, which counts against a budget of bytes.
- :class:`~router.http.response_writer.ResponseWriter` writes one response.
"""
