"""Which parts of an objective go together: refusals with their reasons, warnings, and which keys are read when."""

from __future__ import annotations

from collections.abc import Callable

import ml_collections

from areal_jax.rl.losses import LOSSES, LossConfig, anchor, reads_proximal, resolve
from areal_jax.types import UserError

GROUP_ESTIMATORS = ("group_norm", "dr_grpo", "rloo")


def loss_config(config: ml_collections.ConfigDict) -> LossConfig:
    """`config.loss`, with 'auto' decided."""
    return resolve(LossConfig(constant_length=config.rollout.max_response_length, **config.loss.to_dict()))


def validate(config: ml_collections.ConfigDict) -> None:
    """Raises UserError for a combination that makes no sense, with the reason."""
    for holds, message in _conditions(config):
        if not holds:
            raise UserError(message)


def warnings(config: ml_collections.ConfigDict) -> list[str]:
    """What may well be meant, and should be known."""
    loss, eta = loss_config(config), config.rollout.max_staleness
    found = []
    if eta > 0 and anchor(loss) == "none" and loss.importance_weight == "none":
        found.append(
            f"rollout.max_staleness is {eta:g} and loss.name {loss.name!r} does not correct for who drew a token: its "
            "gradient is biased the more the older the tokens are. Set loss.importance_weight, or another objective"
        )
    if eta > 0 and anchor(loss) == "proximal" and loss.importance_weight == "none":
        found.append(
            f"rollout.max_staleness is {eta:g} and loss.importance_weight 'none': {loss.name} bounds its steps around "
            "the proximal policy and leaves uncorrected that an older one drew the tokens"
        )
    estimator, groups = config.advantage.name, config.rollout.zero_variance_groups
    if groups != "keep" and estimator not in GROUP_ESTIMATORS and not config.advantage.group_baseline:
        found.append(
            f"rollout.zero_variance_groups is {groups!r} and advantage.name {estimator!r}: to this estimator a group "
            "that is all right or all wrong has a signal, and it is thrown away"
        )
    r = config.rollout
    if r.top_k or r.top_p < 1 or r.min_p > 0:
        found.append(
            f"rollout.top_k is {r.top_k}, top_p {r.top_p:g} and min_p {r.min_p:g}: behaviour log-probs are of "
            "the tokens that these leave, the trainer's of all: every ratio to the behaviour is too small by the rest"
        )
    return found


def _conditions(config: ml_collections.ConfigDict) -> list[tuple[bool, str]]:
    loss, resolved, advantage, critic = config.loss, loss_config(config), config.advantage, config.critic.kind
    estimator, rollout, reward = advantage.name, config.rollout, config.reward
    ratio = anchor(resolved)
    alone = rollout.group_size == 1
    return [
        (
            loss.proximal == "auto" or reads_proximal(resolved),
            f"loss.proximal is {loss.proximal!r} and loss.name {loss.name!r} with loss.importance_weight "
            f"{loss.importance_weight!r} reads no proximal log-probs: leave loss.proximal at 'auto', or use a "
            "decoupled objective",
        ),
        (
            loss.importance_weight in ("auto", "none") or ratio != "behaviour",
            f"loss.importance_weight is {loss.importance_weight!r} and loss.name {loss.name!r} is already in terms of "
            "the ratio to the behaviour policy: the weight would count the same difference twice; use a decoupled "
            "objective or reinforce",
        ),
        (
            loss.proximal != "behaviour" or loss.importance_weight not in ("clamp", "mask"),
            f"loss.proximal is 'behaviour' and loss.importance_weight {loss.importance_weight!r}: the weight of a "
            "proximal policy that is the behaviour's is 1, it would correct nothing; use 'recompute' or 'loglinear'",
        ),
        (
            not loss.proximal_check or (resolved.proximal == "loglinear" and reads_proximal(resolved)),
            f"loss.proximal_check compares 'loglinear' with a forward, and loss.proximal is {loss.proximal!r}",
        ),
        (
            resolved.importance_weight != "mask" or loss.importance_low < loss.importance_cap,
            f"loss.importance_low {loss.importance_low} is not below importance_cap {loss.importance_cap}: every token "
            "would be masked",
        ),
        (
            not loss.dual_clip or LOSSES[loss.name].surrogate,
            f"loss.dual_clip is {loss.dual_clip} and loss.name {loss.name!r} is bounded by itself where A < 0: set it "
            "to 0, or use one of " + ", ".join(n for n, o in LOSSES.items() if o.surrogate),
        ),
        (
            (estimator == "gae") == (critic != "none"),
            f"advantage.name is {estimator!r} and critic.kind {critic!r}: gae needs a critic ('head' or 'network'), "
            "and nothing else reads one",
        ),
        (
            not (loss.name == "topr" and estimator in ("gae", "reinforce_pp")),
            f"loss.name is 'topr', which treats a trajectory as good or bad as a whole, and advantage.name "
            f"{estimator!r} has a sign for each token: use an estimator of one value per trajectory",
        ),
        (
            not (advantage.whiten and estimator in ("batch_norm", "reinforce_pp")),
            f"advantage.whiten is True and advantage.name {estimator!r} whitens already: leave one out",
        ),
        (
            not (alone and (estimator in GROUP_ESTIMATORS or advantage.group_baseline)),
            f"rollout.group_size is 1 and advantage.name {estimator!r} compares the samples of a group: every "
            "advantage would be 0; raise group_size or use batch_norm",
        ),
        (
            not (alone and rollout.zero_variance_groups != "keep"),
            f"rollout.group_size is 1 and rollout.zero_variance_groups {rollout.zero_variance_groups!r}: a group of "
            "one has no variance, so that nothing would be left; raise group_size or set 'keep'",
        ),
        (
            not (reward.shuffle and rollout.zero_variance_groups != "keep"),
            f"reward.shuffle is True and rollout.zero_variance_groups {rollout.zero_variance_groups!r}: the choice of "
            "groups would still follow the true rewards, and the control would be none; set 'keep'",
        ),
        (
            not (reward.kl_coefficient and estimator == "group_norm"),
            f"reward.kl_coefficient is {reward.kl_coefficient} and advantage.name 'group_norm': in a group whose "
            "rewards are all the same it would blow the KL's noise up to full size; set loss.kl_coefficient instead, "
            "or use 'dr_grpo' or 'rloo', which do not divide by the deviation",
        ),
        (
            reward.overlong_buffer <= rollout.max_response_length,
            f"reward.overlong_buffer is {reward.overlong_buffer} tokens and rollout.max_response_length "
            f"{rollout.max_response_length}: the buffer lies before that limit; make it smaller",
        ),
    ]


ReadWhen = tuple[Callable[[ml_collections.ConfigDict], bool], str]


def _by_objectives(key: str) -> ReadWhen:
    readers = " or ".join(repr(name) for name, o in LOSSES.items() if key in o.reads)
    return (lambda c: key in LOSSES[c.loss.name].reads, f"with loss.name {readers}")


READ_WHEN: dict[str, ReadWhen] = {
    **{f"loss.{key}": _by_objectives(key) for o in LOSSES.values() for key in o.reads},
    **{
        f"loss.importance_{key}": (
            lambda c: loss_config(c).importance_weight != "none",
            "with importance weights (a decoupled objective, or loss.importance_weight 'clamp' or 'mask')",
        )
        for key in ("level", "cap")
    },
    "loss.importance_low": (
        lambda c: loss_config(c).importance_weight == "mask",
        "with loss.importance_weight 'mask'",
    ),
    "loss.kl_estimator": (lambda c: c.loss.kl_coefficient > 0, "with loss.kl_coefficient > 0"),
    "advantage.gamma": (lambda c: c.advantage.name in ("gae", "reinforce_pp"), "by 'gae' and 'reinforce_pp'"),
    "advantage.lam": (lambda c: c.advantage.name == "gae", "by 'gae'"),
    "advantage.group_baseline": (lambda c: c.advantage.name == "reinforce_pp", "by 'reinforce_pp'"),
    **{
        f"critic.{key}": (lambda c: c.critic.kind != "none", "with a critic (critic.kind)")
        for key in ("learning_rate", "clip")
    },
    "critic.coefficient": (lambda c: c.critic.kind == "head", "with critic.kind 'head'"),
    "reward.overlong_factor": (lambda c: c.reward.overlong_buffer > 0, "with reward.overlong_buffer > 0"),
    **{
        f"rollout.{key}": (lambda c: c.rollout.cache == "paged", "with rollout.cache 'paged'")
        for key in ("cache_tokens", "block_size")
    },
    "optimizer.vocabulary_weight_decay": (
        lambda c: c.model.lora.rank == 0 or c.critic.kind == "network",
        "without LoRA (model.lora.rank 0) or by a critic with a network of its own",
    ),
    **{
        f"model.lora.{key}": (lambda c: c.model.lora.rank > 0, "with LoRA (model.lora.rank)")
        for key in ("alpha", "target_modules")
    },
    "optimizer.final_learning_rate": (
        lambda c: c.optimizer.schedule != "constant",
        "with optimizer.schedule 'cosine' or 'linear'",
    ),
    "rollout.max_refills": (lambda c: c.rollout.zero_variance_groups == "refill", "with zero_variance_groups 'refill'"),
}
"""key -> whether a config reads it, and when that is. An override that is not read is refused."""
