"""What a model will need on a TPU, asked of the real TPU compiler: the catalogue."""
