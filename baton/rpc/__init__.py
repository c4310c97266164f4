"""Calls between the programs, over gRPC, framed TCP connections and Unix sockets."""
