"""Worker pools and their autoscaling, on local processes, Ray or Kubernetes."""
