"""Metrics for Prometheus: each is declared once, with its name, meaning and how it is read.

    runtime ──▶ ServiceReadings, HostReadings ──▶ declarations ──▶ text ──▶ GET /metrics, /hosts/NAME/metrics

The collector reads what the core and the shell know. The page of the reference follows from the same declarations.
"""
