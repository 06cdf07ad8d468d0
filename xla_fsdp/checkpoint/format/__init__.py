"""What shard files say of a model, and where its tensors are in them."""
