"""How a module becomes an FSDP unit: what it manages, its values, its shards."""
