"""Metrics, traces and service level objectives (SLOs) of requests.

- :class:`~router.telemetry.metrics.RouterMetrics` has the router's metrics.
- :class:`~router.telemetry.tracing.RequestTracer` traces requests.
- :class:`~router.telemetry.slo.SloTargets` decides whether an answer met its SLO.
"""
