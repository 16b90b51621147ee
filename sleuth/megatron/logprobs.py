"""Log-probabilities from hidden states without holding all logits: in chunks of tokens, and vocabulary-parallel.

Logits are the largest activation of a language model: T tokens by V words. Here they are computed into one buffer,
a chunk of tokens at a time and only for the tokens that matter, and again in the backward pass (unless they are
small enough to keep). With z = logits / temperature, sharded over the tensor-parallel ranks, each token gets

    log p(y)    with log p_v = z_v - lse(z)
    entropy     = -sum_v p_v log p_v
    mean        = sum_v log p_v / V         for label smoothing

and the derivatives by z_v are 1[v = y] - p_v;  -p_v (log p_v + entropy);  1 / V - p_v.

Elementwise operations work on the buffer a block of rows at a time, so that intermediate results are small and, on
a CPU, stay in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Up to this size, all logits are kept for the backward pass: recomputing them costs a third of the layer's time.
_KEEP_BYTES = 512 * 2**20
# Logits of a block of rows: small enough for a CPU's cache, large enough for a GPU to be busy.
_CPU_BLOCK, _GPU_BLOCK = 2**19, 2**26


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """What to compute. `temperature` divides the logits; `chunk_size` is in tokens.

    The entropy has a gradient only with `entropy_gradient`.
    """

    temperature: float = 1.0
    chunk_size: int = 1024
    entropy: bool = False
    entropy_gradient: bool = False
    mean: bool = False


def token_statistics(
    hidden: Tensor, weight: Tensor, targets: Tensor, options: HeadOptions, group: dist.ProcessGroup
) -> Tensor:
    """Log-probabilities of `targets`, entropies and mean log-probabilities, with gradients.

    hidden [n, H] (equal on the ranks of `group`; its gradient is this rank's part and must be summed over them),
    weight [V / tp, H] (this rank's rows), targets [n] (ids in the whole vocabulary).
    Returns float32 [n, 3] in nats; the entropy and mean columns are 0 unless `options` asks for them.
    """
    keep = torch.is_grad_enabled() and targets.numel() * weight.shape[0] * 4 <= _KEEP_BYTES
    return _TokenStatistics.apply(hidden, weight, targets, options, group, keep)


class _TokenStatistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        options: HeadOptions,
        group: dist.ProcessGroup,
        keep: bool,
    ) -> Tensor:
        total, width = targets.numel(), weight.shape[0]
        targets = targets - width * group.rank()  # relative to this rank's rows
        buffer = _buffer(total if keep else min(total, options.chunk_size), weight)
        local = hidden.new_zeros(5, total, dtype=torch.float32)
        for chunk in _slices(total, options.chunk_size):
            logits = buffer[chunk] if keep else buffer[: chunk.stop - chunk.start]
            _logits(hidden[chunk], weight, logits)
            for rows in _blocks(logits):
                at = slice(chunk.start + rows.start, chunk.start + rows.stop)
                _summarize(logits[rows], targets[at], local[:, at], options)
        out, lse = _combine(local, targets, width, options, group)
        ctx.options, ctx.vocabulary, ctx.logits = options, width * group.size(), buffer if keep else None
        ctx.save_for_backward(hidden, weight, targets, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        hidden, weight, targets, out, lse = ctx.saved_tensors
        kept, ctx.logits = ctx.logits, None  # overwritten below
        options: HeadOptions = ctx.options
        total = targets.numel()
        buffer = _buffer(min(total, options.chunk_size), weight) if kept is None else kept
        grad_hidden = torch.empty_like(hidden)
        # Accumulated in float32, as megatron accumulates gradients.
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for chunk in _slices(total, options.chunk_size):
            grad = buffer[: chunk.stop - chunk.start] if kept is None else kept[chunk]
            if kept is None:
                _logits(hidden[chunk], weight, grad)
            for rows in _blocks(grad):
                at = slice(chunk.start + rows.start, chunk.start + rows.stop)
                _to_gradient(grad[rows], lse[at], out[at], targets[at], grad_out[at], options, ctx.vocabulary)
            grad = grad.to(hidden.dtype)
            torch.mm(grad, weight, out=grad_hidden[chunk])
            if grad.dtype == torch.float32:
                grad_weight.addmm_(grad.t(), hidden[chunk])
            else:
                grad_weight += grad.t() @ hidden[chunk]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None


def _slices(total: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


def _blocks(logits: Tensor) -> Iterator[slice]:
    """The rows of a chunk [n, V / tp] in blocks."""
    size = _GPU_BLOCK if logits.is_cuda else _CPU_BLOCK
    return _slices(len(logits), max(1, size // logits.shape[1]))


def _buffer(rows: int, weight: Tensor) -> Tensor:
    return torch.empty(rows, weight.shape[0], dtype=torch.float32, device=weight.device)


def _logits(hidden: Tensor, weight: Tensor, out: Tensor) -> None:
    """Write this rank's float32 logits [n, V / tp] of hidden states [n, H] into `out`."""
    if hidden.dtype == torch.float32:
        torch.mm(hidden, weight.t(), out=out)
    else:
        out.copy_(hidden @ weight.t())


_LARGEST, _SUM_EXP, _SUM_EXP_Z, _TARGET, _SUM = range(5)


def _summarize(logits: Tensor, targets: Tensor, out: Tensor, options: HeadOptions) -> None:
    """Fill `out` [5, n] from this rank's logits [n, V / tp].

    With logits divided by the temperature, the rows are the largest logit and, with z = logit - largest logit:
    sum exp(z), sum z exp(z), the z of the target (0 if it belongs to another rank), and sum z.
    """
    torch.amax(logits, 1, out=out[_LARGEST])
    z = logits - out[_LARGEST, :, None]
    if options.temperature != 1.0:
        z.div_(options.temperature)
        out[_LARGEST].div_(options.temperature)
    indices, ours = _local_targets(targets, z.shape[1])
    out[_TARGET] = z.gather(1, indices).squeeze(1).where(ours, 0.0)
    if options.mean:
        torch.sum(z, 1, out=out[_SUM])
    if options.entropy:
        exp = z.exp()
        torch.linalg.vecdot(exp, z, out=out[_SUM_EXP_Z])
        torch.sum(exp, 1, out=out[_SUM_EXP])
    else:
        torch.sum(z.exp_(), 1, out=out[_SUM_EXP])


def _local_targets(targets: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """From ids relative to this rank's rows: ids that are safe as an index [n, 1], and whether they are ours [n]."""
    ours = (targets >= 0) & (targets < width)
    return targets.where(ours, 0).unsqueeze(1), ours


def _combine(
    local: Tensor, targets: Tensor, width: int, options: HeadOptions, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Combine the summaries [5, n] of all ranks to statistics [n, 3] and lse [n]."""
    largest = local[_LARGEST].clone()
    if group.size() > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    shift = local[_LARGEST] - largest
    scale = shift.exp()
    sums = torch.stack(
        [
            local[_SUM_EXP] * scale,
            (local[_SUM_EXP_Z] + local[_SUM_EXP] * shift) * scale,
            (local[_TARGET] + shift).where(_local_targets(targets, width)[1], 0.0),
            local[_SUM] + shift * width,
        ]
    )
    if group.size() > 1:
        dist.all_reduce(sums, group=group)
    sum_exp, sum_exp_z, target, total = sums
    log_sum = sum_exp.log()
    out = torch.zeros_like(local[:3].t())
    out[:, 0] = target - log_sum
    if options.entropy:
        out[:, 1] = log_sum - sum_exp_z / sum_exp
    if options.mean:
        out[:, 2] = total / (width * group.size()) - log_sum
    return out, largest + log_sum


def _to_gradient(
    logits: Tensor, lse: Tensor, out: Tensor, targets: Tensor, grad_out: Tensor, options: HeadOptions, vocabulary: int
) -> None:
    """Turn this rank's logits [n, V / tp] into their gradient, in place."""
    to_target, to_entropy, to_mean = (grad_out / options.temperature).unbind(1)
    z = logits if options.temperature == 1.0 else logits.div_(options.temperature)
    log_p = z.sub_(lse.unsqueeze(1))
    if options.entropy_gradient:
        p = log_p.exp()
        grad = log_p.add_(out[:, 1:2]).mul_(-to_entropy.unsqueeze(1)).sub_((to_target + to_mean).unsqueeze(1)).mul_(p)
    else:
        grad = log_p.exp_().mul_(-(to_target + to_mean).unsqueeze(1))
    if options.mean:
        grad += (to_mean / vocabulary).unsqueeze(1)
    indices, ours = _local_targets(targets, grad.shape[1])
    grad.scatter_add_(1, indices, to_target.where(ours, 0.0).unsqueeze(1))
