"""The wrapper under ``torch_xla.distributed.fsdp``'s name: buffers as torch_xla's own has them."""

from __future__ import annotations

from typing import Any

from xla_fsdp.fsdp import wrapper


class _AnyWrapper(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        # Scripts ask whether a model is wrapped; integrations wrap with the class below.
        own = cls is XlaFullyShardedDataParallel
        return isinstance(instance, wrapper.XlaFullyShardedDataParallel if own else object) and (
            own or super().__instancecheck__(instance)
        )


class XlaFullyShardedDataParallel(wrapper.XlaFullyShardedDataParallel, metaclass=_AnyWrapper):
    """``xla_fsdp.XlaFullyShardedDataParallel``, which casts floating-point buffers for good: to
    ``buffer_dtype``, or if that is None to ``compute_dtype``, except for running statistics. It
    warns of the first buffer that it casts to ``compute_dtype``. Files name the own dtype of each
    buffer."""

    _casts_buffers = True
