"""Routes for operators: pools, drains, explanations, usage."""
