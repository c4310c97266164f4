"""The HTTP server, with a bound on everything that a client can send or leave unread."""
