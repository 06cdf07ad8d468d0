"""The only modules that touch torch_xla's internals."""

try:
    import torch_xla  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch_xla":
        raise
    raise ModuleNotFoundError(
        "training and preflight need torch_xla, which is not installed here: "
        "pip install '.[xla]' in a clone of xla_fsdp (on a TPU '.[tpu]'). Without it, "
        "xla_fsdp.checkpoint and the command consolidate_sharded_ckpts work on files",
        name="torch_xla",
    ) from error
