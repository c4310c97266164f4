"""Admin HTTP routes: worker pools, draining and usage."""
