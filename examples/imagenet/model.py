"""The models of the ImageNet job, and how they are cut into units.

Words: as in the package: a *unit* is what is gathered together.
Always true: every rank builds the same values; ``checkpoint_module`` goes inside of a unit, whose
parameters are then gathered again for the recomputation. The model of 10 billion parameters is
``vit_10b``'s, and is never whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torchvision
from torch import nn
from torchvision.models import resnet, vision_transformer

import vit_10b
from job import BIGGEST, JobFailed, Options
from xla_fsdp import Mesh, checkpoint_module, init_mesh, one_rank_at_a_time, parallelize
from xla_fsdp import XlaFullyShardedDataParallel as FSDP  # noqa: N814
from xla_fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

BLOCKS = {
    resnet.BasicBlock,
    resnet.Bottleneck,
    vision_transformer.EncoderBlock,
    vit_10b.Block,
}
"""What ``--auto_wrap_policy type_based`` makes units of."""
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
WITH_SIZE = ("vit_", "maxvit")
"""Models that are built for one size of pictures."""
WITH_AUXILIARY_HEADS = ("inception_v3", "googlenet")


def build_model(options: Options, classes: int) -> nn.Module:
    """The model, for ``classes`` classes, with random values from ``options.seed``."""
    if options.model == BIGGEST:
        torch.manual_seed(options.seed)  # for the values, which wrapping draws
        width, depth, heads = options.vit_sizes
        return vit_10b.build_model(
            width=width, depth=depth, heads=heads, image=options.img_size, classes=classes
        )
    extra: dict[str, Any] = {"num_classes": classes}
    if options.model.startswith(WITH_SIZE):
        size = "input_size" if options.model == "maxvit_t" else "image_size"
        extra[size] = (options.img_size,) * 2 if options.model == "maxvit_t" else options.img_size
    if options.model in WITH_AUXILIARY_HEADS:
        extra.update(aux_logits=False, init_weights=True)
    with one_rank_at_a_time():  # CPU ranks are threads and share the random number generator
        torch.manual_seed(options.seed)
        return torchvision.models.get_model(options.model, weights=None, **extra)


def shard_model(
    model: nn.Module, make_optimizer: MakeOptimizer, options: Options, world_size: int
) -> tuple[FSDP, torch.optim.Optimizer]:
    """Shard by hand, or as the recipe says; make the optimizer."""
    wanted = {
        "mesh": _mesh(options.num_replicas, world_size),
        "flatten_parameters": options.flatten_parameters,
        "compute_dtype": getattr(torch, options.compute_dtype),
        "fp32_reduce_scatter": options.fp32_reduce_scatter,
        "shard_param_on_dim_0": options.shard_param_on_dim_0,
    }
    if options.recipe is None:
        sharded = _shard_by_hand(model, partial(FSDP, **wanted), options)
        return sharded, make_optimizer(sharded.parameters())
    asked = {name: each for name, each in wanted.items() if each}  # the recipe chooses the others
    sharded, optimizer, recipe = parallelize(
        model, make_optimizer, options.recipe, auto_wrap_policy=_policy(options), **asked
    )
    if sharded.rank == 0:
        recipe.explain()
    return sharded, optimizer


def _shard_by_hand(model: nn.Module, wrap: Callable[..., FSDP], options: Options) -> FSDP:
    """Wrap the children, or what a policy selects, or nothing; and then the whole model."""
    remat = checkpoint_module if options.use_gradient_checkpointing else _unchanged
    policy = _policy(options)
    if policy is None:
        if options.use_nested_fsdp:
            _wrap_children(model, lambda child: wrap(remat(child)))
        return wrap(model)
    return wrap(
        model,
        auto_wrap_policy=policy,
        auto_wrapper_callable=lambda module, **keywords: FSDP(remat(module), **keywords),
    )


def _policy(options: Options) -> Callable[..., bool] | None:
    """What chooses the units, if a policy does."""
    policies: dict[str, Callable[..., bool]] = {
        "size_based": partial(
            size_based_auto_wrap_policy, min_num_params=options.auto_wrap_min_num_params
        ),
        "type_based": partial(transformer_auto_wrap_policy, transformer_layer_cls=BLOCKS),
    }
    return policies.get(options.auto_wrap_policy)


def _mesh(replicas: int, world_size: int) -> Mesh | None:
    if world_size % replicas:
        raise JobFailed(f"--num_replicas {replicas} does not divide the {world_size} ranks")
    if replicas == 1:
        return None
    return init_mesh((replicas, world_size // replicas), ("replica", "shard"))


def _wrap_children(model: nn.Module, wrap: Callable[[nn.Module], nn.Module]) -> None:
    for name, child in model.named_children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):  # no layers: the model calls theirs
            _wrap_children(child, wrap)
        elif any(True for _ in child.parameters()):
            setattr(model, name, wrap(child))


def _unchanged(module: nn.Module) -> nn.Module:
    return module
