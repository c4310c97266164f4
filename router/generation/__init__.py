"""One answer over placements, attempts and failovers: from a request's tokens to its outputs."""
