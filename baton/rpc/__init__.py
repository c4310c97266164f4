"""Calls between the programs: gRPC, framed connections, local sockets."""
