"""BatchNorm over the global batch of all ranks; torch's own ``SyncBatchNorm`` only runs on CUDA.

Forward in training makes two all-reduces (the mean; then the variance around it, which rounds
better than a mean of squares), and backward two. Ranks may have batches of different sizes.
Invariants: statistics are in fp32 at least; running statistics are the same on every rank, and the
running variance is unbiased, as in torch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from xla_fsdp.distributed.higher_order import mapped
from xla_fsdp.xla import ops


class SyncBatchNorm(_BatchNorm):
    """BatchNorm for inputs [batch, channels, ...] with the statistics of all ranks' batches.

    Args:
        num_features: number of channels.
        eps: added to the variance.
        momentum: weight of a new batch in the running statistics; None averages over all batches.
        affine: learn a weight and a bias.
        track_running_stats: keep running statistics for evaluation.
        groups: replica groups to take the statistics over (default: all ranks).
        device: device of the parameters and buffers.
        dtype: dtype of the parameters and buffers.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        groups: list[list[int]] | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype
        )
        self.groups = groups

    def forward(self, input: Tensor) -> Tensor:
        """Normalize ``input``; by the running statistics in evaluation, as BatchNorm does."""
        self._check_input_dim(input)
        if not self.training:  # no collective, so one rank may evaluate alone
            return F.batch_norm(
                input,
                self.running_mean,
                self.running_var,
                self.weight,
                self.bias,
                training=self.running_mean is None,
                eps=self.eps,
            )
        centered, mean, var, count = self._centered(input)
        if self.track_running_stats:
            self._track(mean, var, count)
        normal = centered * torch.rsqrt(_as_channels(var, input) + self.eps)
        if self.weight is not None:
            normal = normal * _as_channels(self.weight, input) + _as_channels(self.bias, input)
        return normal.to(input.dtype)

    @classmethod
    def convert_sync_batchnorm(
        cls, module: nn.Module, groups: list[list[int]] | None = None
    ) -> nn.Module:
        """Replace every BatchNorm layer in ``module`` (also torch's SyncBatchNorm) by one of this
        class with the same parameters and buffers. Do it before wrapping.

        Returns:
            ``module``, or the new layer if it is a BatchNorm layer itself.

        Raises:
            ValueError: for a lazy layer that has seen no input yet.
        """
        made = {
            id(layer): cls._like(layer, groups)
            for layer in module.modules()  # each once, also if several modules share it
            if isinstance(layer, _BatchNorm) and not isinstance(layer, cls)
        }
        for parent in module.modules():
            for name, child in parent._modules.items():
                parent._modules[name] = made.get(id(child), child)
        return made.get(id(module), module)

    @classmethod
    def _like(cls, layer: _BatchNorm, groups: list[list[int]] | None) -> SyncBatchNorm:
        if isinstance(layer, LazyModuleMixin) and layer.has_uninitialized_params():
            raise ValueError(
                f"{type(layer).__name__} has no parameters before its first input; run the model "
                f"once, or use a layer with num_features"
            )
        new = cls(
            layer.num_features,
            layer.eps,
            layer.momentum,
            layer.affine,
            layer.track_running_stats,
            groups,
            device="meta",
        )
        new._parameters.update(layer._parameters)
        new._buffers.update(layer._buffers)
        new.training = layer.training
        return new

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ValueError(
                f"expected an input of shape [batch, {self.num_features}, ...], got "
                f"{tuple(input.shape)}"
            )

    def _centered(self, input: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the input less its mean; mean and biased variance, [channels]; the number of
        values in each channel over all ranks, [1]."""
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        dims = [dim for dim in range(input.dim()) if dim != 1]
        own_count = wide.new_full((1,), input.numel() // self.num_features)
        sums = _all_reduce(torch.cat([wide.sum(dims), own_count]), self.groups)
        count = sums[-1:].detach()
        mean = sums[:-1] / count
        centered = wide - _as_channels(mean, input)
        var = _all_reduce(centered.square().sum(dims), self.groups) / count
        return centered, mean, var, count

    @torch.no_grad()
    def _track(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        momentum: Any = self.momentum
        if momentum is None and self.num_batches_tracked is not None:
            momentum = 1.0 / self.num_batches_tracked.to(mean.dtype)
        unbiased = var * (count / (count - 1).clamp(min=1))
        for running, value in ((self.running_mean, mean), (self.running_var, unbiased)):
            if running is not None:
                running.copy_(running + momentum * (value.to(running.dtype) - running))


def _all_reduce(value: Tensor, groups: ops.Groups) -> Tensor:
    """Sum over ranks; the gradient is the sum of the ranks' gradients."""
    alone = len(groups[0]) == 1 if groups else ops.world_size() == 1

    def total(value: Tensor) -> Tensor:
        return value.clone() if alone else ops.all_reduce("sum", value, groups)

    return mapped(value, total, total)


def _as_channels(values: Tensor, like: Tensor) -> Tensor:
    """Return [channels] as [1, channels, 1, ...]."""
    return values.reshape(1, -1, *(1 for _ in range(like.dim() - 2)))
