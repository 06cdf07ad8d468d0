"""The only modules that touch torch_xla's internals."""
