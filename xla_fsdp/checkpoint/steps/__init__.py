"""Directories of steps: saved so that a crash leaves the last one, and loaded."""
