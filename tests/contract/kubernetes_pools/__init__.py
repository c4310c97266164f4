"""Worker pools in Kubernetes, against a small API server."""
