"""Attention with memory that is linear in the length: ``api.attention``."""
