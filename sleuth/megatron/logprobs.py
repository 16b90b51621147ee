"""Log-probabilities from hidden states, without ever holding all logits: chunked and vocabulary-parallel.

The output layer is the largest activation of a language model: T tokens by V words. Here it is computed a
chunk of tokens at a time, only for the tokens that matter, and again in the backward pass (unless it is small
enough to keep). With z = logits / temperature, sharded over the tensor-parallel ranks, each token gets

    log p(y)    with log p_v = z_v - lse(z)
    entropy     = -sum_v p_v log p_v
    mean        = sum_v log p_v / V         for label smoothing

and d/dz_v of them: 1[v = y] - p_v;  -p_v (log p_v + entropy);  1 / V - p_v.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Up to this size, all words' log-probabilities are kept for the backward pass: recomputing costs a third of the layer.
_KEEP_BYTES = 512 * 2**20


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """What to compute, and how: `temperature` divides the logits, `chunk_size` is in tokens.

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
        start = weight.shape[0] * group.rank()
        out = torch.zeros(targets.numel(), 3, dtype=torch.float32, device=hidden.device)
        kept = []
        for chunk in _chunks(targets.numel(), options.chunk_size):
            log_p = _log_probs(hidden[chunk], weight, options.temperature, group)
            _statistics(log_p, targets[chunk] - start, out[chunk], options, group)
            if keep:
                kept.append(log_p)
        ctx.options, ctx.start, ctx.group = options, start, group
        ctx.save_for_backward(hidden, weight, targets, out, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        hidden, weight, targets, out, *kept = ctx.saved_tensors
        options: HeadOptions = ctx.options
        grad_hidden = torch.empty_like(hidden)
        # Accumulated in float32, as megatron accumulates gradients.
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        vocabulary = weight.shape[0] * ctx.group.size()
        for number, chunk in enumerate(_chunks(targets.numel(), options.chunk_size)):
            log_p = kept[number] if kept else _log_probs(hidden[chunk], weight, options.temperature, ctx.group)
            targets_here = targets[chunk] - ctx.start
            grad = _logit_gradient(log_p, out[chunk], targets_here, grad_out[chunk], options, vocabulary)
            grad = grad.to(hidden.dtype)
            torch.mm(grad, weight, out=grad_hidden[chunk])
            if grad.dtype == torch.float32:
                grad_weight.addmm_(grad.t(), hidden[chunk])
            else:
                grad_weight += grad.t() @ hidden[chunk]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None


def _chunks(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def _log_probs(hidden: Tensor, weight: Tensor, temperature: float, group: dist.ProcessGroup) -> Tensor:
    """[n, H] -> this rank's float32 log-probabilities [n, V / tp]"""
    logits = (hidden @ weight.t()).float()
    if temperature != 1.0:
        logits.div_(temperature)
    if group.size() == 1:
        return torch.log_softmax(logits, 1)
    return logits.sub_(_log_sum_exp(torch.logsumexp(logits, 1), group).unsqueeze(1))


def _log_sum_exp(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """log(sum over ranks of exp(values))"""
    largest = values.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return largest + torch.log(_sum(torch.exp(values - largest), group))


def _sum(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    if group.size() > 1:
        dist.all_reduce(values, group=group)
    return values


def _local_targets(targets: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Ids relative to this rank's rows -> (ids that are safe to index with [n, 1], whether they are ours [n])."""
    ours = (targets >= 0) & (targets < width)
    return targets.where(ours, 0).unsqueeze(1), ours


def _statistics(log_p: Tensor, targets: Tensor, out: Tensor, options: HeadOptions, group: dist.ProcessGroup) -> None:
    """Fill `out` [n, 3] from this rank's log-probabilities [n, V / tp]."""
    indices, ours = _local_targets(targets, log_p.shape[1])
    out[:, 0] = log_p.gather(1, indices).squeeze(1).where(ours, 0.0)
    if options.entropy:
        out[:, 1] = -torch.linalg.vecdot(log_p.exp(), log_p)
    if options.mean:
        out[:, 2] = log_p.sum(1) / (log_p.shape[1] * group.size())
    _sum(out, group)


def _logit_gradient(
    log_p: Tensor, out: Tensor, targets: Tensor, grad_out: Tensor, options: HeadOptions, vocabulary: int
) -> Tensor:
    """The gradient with respect to the undivided logits [n, V / tp]; reuses the memory of `log_p`."""
    to_target, to_entropy, to_mean = grad_out.unbind(1)
    if options.entropy_gradient:
        p = log_p.exp()
        grad = log_p.add_(out[:, 1:2]).mul_(-to_entropy.unsqueeze(1)).sub_((to_target + to_mean).unsqueeze(1)).mul_(p)
    else:
        grad = log_p.exp_().mul_(-(to_target + to_mean).unsqueeze(1))
    if options.mean:
        grad += (to_mean / vocabulary).unsqueeze(1)
    indices, ours = _local_targets(targets, grad.shape[1])
    grad.scatter_add_(1, indices, to_target.where(ours, 0.0).unsqueeze(1))
    return grad if options.temperature == 1.0 else grad.div_(options.temperature)
