"""The TPU compiler, asked without a TPU."""
