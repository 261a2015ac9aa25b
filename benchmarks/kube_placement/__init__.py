"""Placement on a real API server and kube-scheduler, with the openb trace."""
