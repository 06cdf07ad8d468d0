"""One call that shards a model in the best way it allows: ``parallelize`` and its ``Recipe``."""
