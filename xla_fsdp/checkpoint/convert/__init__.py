"""Merging, resharding, and the formats of others."""
