"""State dicts of models and optimizers: sharded, full, and in the form of DCP."""
