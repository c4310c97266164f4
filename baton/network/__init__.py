"""Network security: signed calls, TLS, limits of gRPC servers, and a table of listening sockets.

- :class:`~baton.network.call_signing.CallVerifier` verifies the signature of each call.
- :mod:`~baton.network.tls` sets up mutual TLS between members, with certificate files that may
  change while the programs run.
- :class:`~baton.network.listeners.ListenerSpec` describes one kind of listening socket;
  docs/network.md has the table.
- :class:`~baton.network.browser_guard.BrowserGuard` refuses requests from web pages of other sites.
"""
