"""Worker pools as Deployments: API client, resizing, draining of pods, the leader's Lease."""
