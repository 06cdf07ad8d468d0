"""Attention by JAX's splash attention kernel, on a TPU.

Lengths are padded to multiples of blocks; padded keys are masked, results of padded queries cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from xla_fsdp.nn.attention.options import Implementation, Options, Pair
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


def implementation(*, interpret: bool = False) -> Implementation:
    """Return attention by the kernel, or by an interpreter of it that runs on CPU."""

    def forward(
        options: Options, query: Tensor, key: Tensor, value: Tensor, segments: Pair | None
    ) -> tuple[Tensor, Tensor]:
        given = [query, key, value, *(segments or ())]
        function, costs = _Forward(options, interpret), flops(options, query, key, value)
        output, logsumexp = call_jax(function, given, interpret=interpret, flops=costs)
        return output, logsumexp

    def backward(
        options: Options,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        segments: Pair | None,
        output: Tensor,
        logsumexp: Tensor,
        grad: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        given = [query, key, value, output, logsumexp, grad, *(segments or ())]
        function, costs = _Backward(options, interpret), flops(options, query, key, value)
        grads = call_jax(function, given, interpret=interpret, flops=costs)
        return grads[0], grads[1], grads[2]

    return Implementation(forward, backward)


SPLASH = implementation()


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


def _count(
    options: Options, query: Tensor, key: Tensor, value: Tensor, segments: Pair | None
) -> tuple[Tensor, Tensor]:
    batch, heads, queries, size = query.shape
    pairs = _pairs(options, queries, key.shape[2])
    left = torch.empty(batch * heads, pairs, device="meta")
    _ = left @ torch.empty(pairs, size + value.shape[-1], device="meta")
    output = query.new_zeros(batch, heads, queries, value.shape[-1])
    return output, query.new_zeros(batch, heads, queries, dtype=torch.float32)


COUNTED = Implementation(
    _count,
    lambda _, query, key, value, *others: (
        torch.zeros_like(query),
        torch.zeros_like(key),
        torch.zeros_like(value),
    ),
)
"""Computes zeros, with a product of the kernel's operations for those who count them."""


# ---------------------------------------------------------------- in JAX


@dataclass(frozen=True)
class _Forward:
    options: Options
    interpret: bool

    def __call__(self, query: Any, key: Any, value: Any, *segments: Any) -> Any:
        import jax

        call = _Call.of(self.options, query, key, self.interpret)
        q, k, v = call.scaled(query), call.padded_keys(key), call.padded_keys(value)
        output, (logsumexp,) = jax.vmap(call.kernel(for_backward=False))(
            q, k, v, call.segments(segments)
        )
        return output[:, :, : call.queries], logsumexp[:, :, : call.queries]


@dataclass(frozen=True)
class _Backward:
    options: Options
    interpret: bool

    def __call__(
        self,
        query: Any,
        key: Any,
        value: Any,
        output: Any,
        logsumexp: Any,
        grad: Any,
        *segments: Any,
    ) -> Any:
        import jax
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as sk

        call = _Call.of(self.options, query, key, self.interpret)
        kernel = call.kernel(for_backward=True)

        def grads(
            q: Any, k: Any, v: Any, ids: Any, out: Any, statistics: Any, grad_out: Any
        ) -> Any:
            masks = kernel.dq_mask_info, kernel.dkv_mask_info
            saved = q, k, v, ids, None, out, statistics, *masks
            # Called by itself, as JAX would only run it after its own forward, which saves the
            # output and its statistics where torch has no say.
            return sk._splash_attention_bwd(**kernel.kwargs, res=saved, do=grad_out)[3:6]

        q, k, v = call.scaled(query), call.padded_keys(key), call.padded_keys(value)
        # Padded queries have gradients of zero, and so add nothing.
        rows = [call.padded_queries(each) for each in (output, logsumexp, grad)]
        grad_q, grad_k, grad_v = jax.vmap(grads)(q, k, v, call.segments(segments), *rows)
        return (
            call.times_scale(grad_q[:, :, : call.queries], query.dtype),
            grad_k[:, :, : call.keys].astype(key.dtype),
            grad_v[:, :, : call.keys].astype(value.dtype),
        )


@dataclass(frozen=True)
class _Call:
    """One call of the kernel, with arrays of JAX."""

    options: Options
    batch: int
    heads: int
    queries: int
    keys: int
    interpret: bool

    @classmethod
    def of(cls, options: Options, query: Any, key: Any, interpret: bool) -> _Call:
        batch, heads, queries = query.shape[:3]
        return cls(options, batch, heads, queries, key.shape[2], interpret)

    def kernel(self, *, for_backward: bool) -> Any:
        """Return the kernel for [heads, queries, size], padded."""
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as sk
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

        q, kv = _block(self.queries), _block(self.keys)
        blocks: dict[str, Any] = {"block_q": q, "block_kv": kv, "block_kv_compute": kv}
        if for_backward:  # else not even given, as the mask is then cut into blocks again
            blocks |= {"block_q_dq": q, "block_kv_dq": kv}
            blocks |= {"block_q_dkv": q, "block_kv_dkv": kv, "block_kv_dkv_compute": kv}
        return sk.make_splash_mha(
            masks.MultiHeadMask([self._mask(masks)] * self.heads),
            # The fused backward stores a part of the queries' gradients for each block of keys.
            block_sizes=sk.BlockSizes(**blocks, use_fused_bwd_kernel=False),
            save_residuals=True,
            attn_logits_soft_cap=self.options.soft_cap,
            head_shards=1,
            q_seq_shards=1,
            interpret=self.interpret,
        )

    def _mask(self, masks: Any) -> Any:
        shape = _padded(self.queries), _padded(self.keys)
        if self.options.sees_whole(self.queries, self.keys):
            return masks.FullMask(shape)
        left = None if self.options.window is None else self.options.window - 1
        return masks.LocalMask(shape, (left, 0 if self.options.is_causal else left), 0)

    def scaled(self, query: Any) -> Any:
        """Return padded queries times the scale, which the kernel does not know."""
        return self.padded_queries(self.times_scale(query, query.dtype))

    def times_scale(self, array: Any, dtype: Any) -> Any:
        """Return ``array`` times the scale."""
        return (array.astype("float32") * self.options.scale).astype(dtype)

    def padded_queries(self, array: Any) -> Any:
        """Return [batch, heads, queries, ...] padded with zeros."""
        return _pad(array, 2, _padded(self.queries))

    def padded_keys(self, array: Any) -> Any:
        """Return [batch, heads, keys, ...] padded with zeros."""
        return _pad(array, 2, _padded(self.keys))

    def segments(self, given: Any) -> Any:
        """Return the kernel's segment ids; None where positions mask all that is to be masked.

        Args:
            given: none, or one array for queries, [batch, queries], and one for keys.
        """
        import jax.numpy as jnp
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as sk

        if given:
            lengths = _padded(self.queries), _padded(self.keys)
            pairs = zip(given, lengths, strict=True)
            return sk.SegmentIds(*(_pad(ids, 1, length, _PADDING) for ids, length in pairs))
        hides_padding = self.options.is_causal and self.queries <= self.keys
        if hides_padding or _padded(self.keys) == self.keys:
            return None
        both = [
            _pad(jnp.zeros((self.batch, length), jnp.int32), 1, _padded(length), _PADDING)
            for length in (self.queries, self.keys)
        ]
        return sk.SegmentIds(*both)


def _block(length: int) -> int:
    """Return the largest block that pads ``length`` by less than a sixteenth; 128 if none does."""
    return next((each for each in BLOCKS if -length % each * 16 < length), BLOCKS[-1])


def _padded(length: int) -> int:
    return length + -length % _block(length)


def _pad(array: Any, axis: int, length: int, value: int = 0) -> Any:
    import jax.numpy as jnp

    widths = [(0, length - array.shape[at] if at == axis else 0) for at in range(array.ndim)]
    return jnp.pad(array, widths, constant_values=value)
