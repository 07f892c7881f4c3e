"""Reasoning on arithmetic: `--config=configs/math.py[:preset]`."""

import ml_collections

from configs import default


def tiny() -> ml_collections.ConfigDict:
    """A 0.3M-parameter model that learns to show its work again: minutes on two CPU cores.

    The warm start teaches column addition, then hides it behind a habit of blurting the answer; RL brings it back.
    """
    return default.get_config()


def tiny_skill() -> ml_collections.ConfigDict:
    """As `tiny`, with nothing hidden: the warm start stops early and RL adds skill."""
    c = default.get_config()
    c.warm_start.skill_accuracy = 0.65
    c.warm_start.habit_updates = 0
    c.trainer.steps = 150
    c.evaluation.every_steps = 10
    return c


def smollm2_135m() -> ml_collections.ConfigDict:
    """SmolLM2-135M on two-digit addition, four examples in the prompt: a real model on a laptop, in under an hour."""
    c = default.get_config()
    c.model.path = "HuggingFaceTB/SmolLM2-135M-Instruct"
    c.warm_start.enabled = False
    c.data.name = "two_digit_addition"
    c.data.template = "few_shot"
    c.data.question_format = "Q: {question}\nA:"
    c.data.shots = 4
    c.data.heldout_problems = 200
    c.reward.name = "math"
    c.rollout.max_prompt_length = 96
    c.rollout.max_response_length = 16
    c.rollout.stop_strings = ("\n",)
    c.rollout.slots = 32
    c.rollout.chunk = 4
    c.rollout.max_staleness = 2.0
    c.rollout.queue_capacity = 256
    c.trainer.steps = 30
    c.trainer.batch_prompts = 8
    c.trainer.minibatches = 1
    c.trainer.row_length = 272  # three sequences of about 88 tokens
    c.trainer.micro_batch_rows = 2
    c.optimizer.learning_rate = 1e-5
    c.optimizer.final_learning_rate = 1e-5
    c.optimizer.warmup_steps = 5
    c.evaluation.every_steps = 10
    c.checkpoint.every_steps = 10
    return c


PRESETS = {"tiny": tiny, "tiny-skill": tiny_skill, "smollm2-135m": smollm2_135m}


def get_config(preset: str = "tiny") -> ml_collections.ConfigDict:
    """The config of a preset. Raises ValueError for an unknown name, with the nearest right one."""
    if preset not in PRESETS:
        import difflib

        near = difflib.get_close_matches(preset, PRESETS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown preset {preset!r} of configs/math.py{hint} Known: {', '.join(PRESETS)}")
    c = PRESETS[preset]()
    c.preset = preset
    return c
