"""Ranks: meshes, the torus, shard layout, collectives, and launching."""
