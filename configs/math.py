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


PRESETS = {"tiny": tiny, "tiny-skill": tiny_skill}


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
