"""Generates one answer: places the request, submits it to workers, fails over if they fail, and
streams their outputs."""
