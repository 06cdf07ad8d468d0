"""The mechanism of one FSDP unit: shards, all-gather, reduce-scatter, autograd nodes."""
