"""Tests of worker pools in Kubernetes, against a small API server."""
