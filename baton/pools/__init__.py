"""Where the workers of the pools run: local processes, Ray, Kubernetes."""
