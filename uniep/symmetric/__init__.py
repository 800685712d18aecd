"""Symmetric memory: the same layout on every rank, and a table of where each rank's lies."""
