"""The Prometheus exporter; dashboards and alert rules as data.

Reads the controller's view; changes nothing.
"""
