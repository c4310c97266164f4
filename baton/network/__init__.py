"""Trust on the network: signed calls, TLS, limits of gRPC servers, every listening socket."""
