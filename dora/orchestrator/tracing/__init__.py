"""Traces for OpenTelemetry: spans of sessions, turns, steps, handoffs and publications, from the core's events."""
