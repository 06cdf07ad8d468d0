"""Layers: attention, heads and embeddings in pieces, recomputing, batch norm."""
