"""Devices that are not there, behaving as the hardware does: specifications, legal Layouts, refusals and delays."""
