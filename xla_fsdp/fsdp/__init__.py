"""Fully sharded data parallel: the wrapper, ``fully_shard``, and the engine below both."""
