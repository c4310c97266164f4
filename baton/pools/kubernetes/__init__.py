"""Worker pools as Deployments in Kubernetes: API client, resizing, draining of pods, and the
leader's Lease."""
