"""HTTP routes for operators: pools, draining, request records, usage."""
