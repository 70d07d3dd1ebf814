"""Importance weights for tokens that were sampled by a policy other than the trained one.

Three policies: the *behaviour* policy, whose logprobs the engine reported; the *proximal* one, the
learner's before the batch's first update; and the one that is trained. The loss bounds the step
from proximal to trained; what lies between behaviour and proximal, older weights and the engine's
other arithmetic, is a weight on each token (the decoupled objective: Hilton et al., arXiv
2110.00641, equation 2; in asynchronous training AReaL, arXiv 2505.24298).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import torch
from torch import Tensor

from rollout_workers.algorithms.reduction import mean_over_sample, sum_over_sample

CORRECTIONS = ("truncate", "mask", "none")
LEVELS = ("token", "sequence", "geometric")
SAMPLE_MASKS = ("none", "sequence", "geometric")

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to ±20, because ``exp`` of much larger values overflows float32."""


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """``exp`` of a log-ratio clamped to ``LOG_RATIO_LIMIT``, with gradient 0 beyond it. float
    [N] -> float [N]."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def importance_weights(
    proximal: Tensor,
    behaviour: Tensor,
    sample: Tensor | None,
    *,
    correction: str,
    level: str,
    cap: float,
    floor: float,
) -> Tensor:
    """The weight of each token, a constant for the gradient. float [N], [N], int64 [N] -> float
    [N].

    ``level``: the ratio of the token (``token``), of its whole sample (``sequence``, the product),
    or the geometric mean over its sample (``geometric``, comparable between lengths: GSPO, arXiv
    2507.18071). ``sample`` may be absent at level ``token``.
    ``correction``:

    - ``truncate`` at ``cap``, which bounds the variance and biases towards the behaviour policy
      (Ionides 2008; per token as in IMPALA's rho, arXiv 1802.01561);
    - ``mask``, 0 outside ``floor`` .. ``cap``: where the two policies disagree nothing is taught,
      rather than a little (IcePop, Ling Team, "Every Step Evolves", arXiv 2510.18855, with 0.5 and
      5);
    - ``none``: ones.

    Raises ``ValueError``.
    """
    if correction == "none":
        return torch.ones_like(behaviour)
    ratio = _ratio(proximal, behaviour, sample, level)
    return ratio.clamp(max=cap) if correction == "truncate" else ratio.masked_fill((ratio < floor) | (ratio > cap), 0.0)


def trusted_samples(
    proximal: Tensor, behaviour: Tensor, sample: Tensor | None, *, level: str, cap: float, floor: float
) -> Tensor:
    """Whether the ratio of each token's sample is within ``floor`` .. ``cap``. float [N], [N],
    int64 [N] -> bool [N], equal for all tokens of a sample.

    The loss leaves out the samples outside (sequence-level masked importance sampling, MIS: Liu, Li
    et al., "When Speed Kills Stability", 2025, with floor 0)::

        M(sample) = 1 if floor <= rho(sample) <= cap else 0

    ``level``: rho is the product of the token ratios ``proximal / behaviour`` over the sample
    (``sequence``), or their geometric mean (``geometric``), which does not depend on the length and
    therefore needs bounds near 1. M multiplies the importance weight, if there is one, so a sample
    may be judged as a whole and weighed token by token. Raises ``ValueError``.
    """
    ratio = _ratio(proximal, behaviour, sample, level)
    return (ratio >= floor) & (ratio <= cap)


def _ratio(proximal: Tensor, behaviour: Tensor, sample: Tensor | None, level: str) -> Tensor:
    """float [N], without gradient."""
    log_ratio = proximal.detach() - behaviour
    if level != "token":
        if sample is None:
            raise ValueError(f"importance weights at level {level!r} need the sample of each token")
        log_ratio = (sum_over_sample if level == "sequence" else mean_over_sample)(log_ratio, sample)
    return bounded_exp(log_ratio)


def staleness_histogram(steps_behind: Sequence[int]) -> dict[str, float]:
    """Shares of samples by the optimizer steps between the weights that sampled them and those that
    are trained.

    Buckets 0, 1, 2, 3 to 4, 5 to 8, 9 and more, each ``staleness/share_<from>``. Empty for no
    sample.

    >>> staleness_histogram([0, 0, 1, 12])["staleness/share_0"]
    0.5
    """
    starts = [0, 1, 2, 3, 5, 9]
    counts: dict[int, int] = dict.fromkeys(starts, 0)
    for steps in steps_behind:
        counts[starts[bisect_right(starts, max(0, steps)) - 1]] += 1
    return {f"staleness/share_{start}": count / len(steps_behind) for start, count in counts.items()} if steps_behind else {}
