"""Attention by JAX's splash attention kernel, on a TPU.

Lengths are padded to multiples of blocks; padded keys are masked, results of padded queries cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from xla_fsdp.nn.attention.options import Options, Tokens
from xla_fsdp.xla.kernels import Flops, call_jax, has_jax

DTYPES = (torch.bfloat16, torch.float32)
# Multiples of 128. Of 1,024, heads of 256 elements do not fit into the vector memory of a v4.
BLOCKS = (512, 256, 128)
MAX_HEAD_SIZE = 256  # larger blocks of keys and values do not fit into vector memory

# No user's segment: that of padding.
_PADDING = -(2**31)


def problem(query: Tensor, value: Tensor) -> str | None:
    """Return what the kernel cannot take; None if nothing."""
    if not has_jax():
        return "JAX is not installed (pip install 'torch_xla[pallas]')"
    if query.dtype not in DTYPES:
        return f"it takes bfloat16 and float32, not {query.dtype}"
    size = max(query.shape[-1], value.shape[-1])
    if size > MAX_HEAD_SIZE:
        return f"it takes heads of up to {MAX_HEAD_SIZE} elements, not {size}"
    return None


@dataclass(frozen=True)
class Splash:
    """Attention by the kernel, or by an interpreter of it that runs on CPU."""

    interpret: bool = False

    def forward(self, options: Options, tokens: Tokens) -> tuple[Tensor, Tensor]:
        output, logsumexp = self._run(_Forward(options, self.interpret), options, tokens)
        return output, logsumexp

    def backward(
        self, options: Options, tokens: Tokens, output: Tensor, logsumexp: Tensor, grad: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        function = _Backward(options, self.interpret)
        q, k, v = self._run(function, options, tokens, output, logsumexp, grad)
        return q, k, v

    def _run(self, function: Any, options: Options, tokens: Tokens, *results: Tensor) -> Any:
        given = [*tokens[:3], *results, *(tokens.segments or ())]
        costs = flops(options, *tokens[:3])
        return call_jax(function, given, interpret=self.interpret, flops=costs)


SPLASH = Splash()


def flops(options: Options, query: Any, key: Any, value: Any) -> Flops:
    """Return the operations of each kernel, without those of blocks that the mask skips."""
    batch, heads, queries, size = query.shape
    value_size = value.shape[-1]
    per_element = 2 * batch * heads * _pairs(options, queries, key.shape[2])
    return (
        ("splash_mha_fwd", per_element * (size + value_size)),
        ("splash_mha_dq", per_element * (2 * size + value_size)),
        ("splash_mha_dkv", per_element * 2 * (size + value_size)),
    )


def _pairs(options: Options, queries: int, keys: int) -> int:
    """Return how many pairs of a query and a key are in blocks of keys that the mask leaves."""
    blocks = (range(at, min(at + _block(keys), keys)) for at in range(0, keys, _block(keys)))
    return sum(len(each) * len(options.queries_of(each, queries)) for each in blocks)


class Counted:
    """Computes zeros, with a product of the kernel's operations for those who count them."""

    def forward(self, options: Options, tokens: Tokens) -> tuple[Tensor, Tensor]:
        query, key, value, _ = tokens
        batch, heads, queries, size = query.shape
        pairs = _pairs(options, queries, key.shape[2])
        left = torch.empty(batch * heads, pairs, device="meta")
        _ = left @ torch.empty(pairs, size + value.shape[-1], device="meta")
        output = query.new_zeros(batch, heads, queries, value.shape[-1])
        return output, query.new_zeros(batch, heads, queries, dtype=torch.float32)

    def backward(
        self, options: Options, tokens: Tokens, *results: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, _ = tokens
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)


# ---------------------------------------------------------------- in JAX


@dataclass(frozen=True)
class _Kernel:
    """A call of the kernel, with arrays of JAX."""

    options: Options
    interpret: bool

    def kernel(self, query: Any, key: Any, *, for_backward: bool) -> Any:
        """Return the kernel for [heads, queries, size], padded."""
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as sk
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

        heads, queries, keys = query.shape[1], query.shape[2], key.shape[2]
        q, kv = _block(queries), _block(keys)
        blocks: dict[str, Any] = {"block_q": q, "block_kv": kv, "block_kv_compute": kv}
        if for_backward:  # else not even given, as the mask is then cut into blocks again
            blocks |= {"block_q_dq": q, "block_kv_dq": kv}
            blocks |= {"block_q_dkv": q, "block_kv_dkv": kv, "block_kv_dkv_compute": kv}
        mask: Any = masks.FullMask((_padded(queries), _padded(keys)))
        if not self.options.sees_whole(queries, keys):
            left = None if self.options.window is None else self.options.window - 1
            right = 0 if self.options.is_causal else left
            mask = masks.LocalMask((_padded(queries), _padded(keys)), (left, right), 0)
        return sk.make_splash_mha(
            masks.MultiHeadMask([mask] * heads),
            # The fused backward stores a part of the queries' gradients for each block of keys.
            block_sizes=sk.BlockSizes(**blocks, use_fused_bwd_kernel=False),
            save_residuals=True,
            attn_logits_soft_cap=self.options.soft_cap,
            head_shards=1,
            q_seq_shards=1,
            interpret=self.interpret,
        )

    def inputs(self, query: Any, key: Any, value: Any, segments: Any) -> tuple[Any, ...]:
        """Return the kernel's inputs: query, key and value, padded, and ids of segments, of queries
        and of keys; None where positions mask all that is to be masked."""
        import jax.numpy as jnp
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as sk

        batch, queries, keys = len(query), query.shape[2], key.shape[2]
        hides_padding = self.options.is_causal and queries <= keys
        if not segments and not hides_padding and _padded(keys) != keys:
            segments = [jnp.zeros((batch, length), jnp.int32) for length in (queries, keys)]
        ids = sk.SegmentIds(*(_pad(each, 1, _PADDING) for each in segments)) if segments else None
        # The kernel does not know the scale.
        return _pad(self.times_scale(query, query.dtype), 2), _pad(key, 2), _pad(value, 2), ids

    def times_scale(self, array: Any, dtype: Any) -> Any:
        """Return ``array`` times the scale."""
        return (array.astype("float32") * self.options.scale).astype(dtype)


class _Forward(_Kernel):
    def __call__(self, query: Any, key: Any, value: Any, *segments: Any) -> Any:
        import jax

        kernel = jax.vmap(self.kernel(query, key, for_backward=False))
        output, (logsumexp,) = kernel(*self.inputs(query, key, value, segments))
        return output[:, :, : query.shape[2]], logsumexp[:, :, : query.shape[2]]


class _Backward(_Kernel):
    def __call__(self, query: Any, key: Any, value: Any, *others: Any) -> Any:
        import jax
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as sk

        kernel = self.kernel(query, key, for_backward=True)

        def grads(
            q: Any, k: Any, v: Any, ids: Any, out: Any, statistics: Any, grad_out: Any
        ) -> Any:
            masks = kernel.dq_mask_info, kernel.dkv_mask_info
            saved = q, k, v, ids, None, out, statistics, *masks
            # Called by itself, as JAX would only run it after its own forward, which saves the
            # output and its statistics where torch has no say.
            return sk._splash_attention_bwd(**kernel.kwargs, res=saved, do=grad_out)[3:6]

        # Padded queries have gradients of zero, and so add nothing.
        rows = [_pad(each, 2) for each in others[:3]]  # output, log-sum-exp, gradient
        inputs = self.inputs(query, key, value, others[3:])
        grad_q, grad_k, grad_v = jax.vmap(grads)(*inputs, *rows)
        return (
            self.times_scale(grad_q[:, :, : query.shape[2]], query.dtype),
            grad_k[:, :, : key.shape[2]].astype(key.dtype),
            grad_v[:, :, : key.shape[2]].astype(value.dtype),
        )


def _block(length: int) -> int:
    """Return the largest block that pads ``length`` by less than a sixteenth; 128 if none does."""
    return next((each for each in BLOCKS if -length % each * 16 < length), BLOCKS[-1])


def _padded(length: int) -> int:
    return length + -length % _block(length)


def _pad(array: Any, axis: int, value: int = 0) -> Any:
    """Pad a dim to whole blocks."""
    import jax.numpy as jnp

    length = array.shape[axis]
    widths = [(0, _padded(length) - length if at == axis else 0) for at in range(array.ndim)]
    return jnp.pad(array, widths, constant_values=value)
