"""A user's own config file that adds a reward, and whose reward has a bug: used by the tests of failures."""

from areal_jax.rewards.math import REWARDS
from tests import small_config


def broken(prompt, response, finish_reason):
    raise ZeroDivisionError("the grader divided by zero")


REWARDS["broken"] = broken


def get_config(preset="tiny"):
    c = small_config.get_config(preset)
    c.reward.name = "broken"
    return c
