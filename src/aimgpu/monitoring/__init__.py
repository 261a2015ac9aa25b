"""The Prometheus exporter; dashboards and alert rules as data.

Start at `exporter.Exporter`; `metrics` is the one table of names, from which the reference page is made. Reads the controller's
view; changes nothing.
"""
