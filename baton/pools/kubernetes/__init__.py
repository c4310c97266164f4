"""Worker pools as Deployments: the API client, resizing, draining pods, the leader's Lease."""
