"""A preset shrunk to seconds. Its reward, an odd number of characters, varies even for an untrained model."""

from areal_jax.rewards.math import REWARDS
from configs import math as presets


def odd_length(prompt, response, finish_reason):
    return float(len(response) % 2)


REWARDS["odd_length"] = odd_length


def get_config(preset="tiny"):
    c = presets.get_config(preset)
    c.reward.name = "odd_length"
    for area, values in {
        "model": {"layers": 1, "d_model": 32, "heads": 2, "kv_heads": 2, "d_ff": 32},
        "rollout": {"slots": 16, "group_size": 4, "queue_capacity": 64},
        "trainer": {"batch_prompts": 4, "micro_batch_rows": 4, "steps": 3},
        "warm_start": {"skill_updates": 4, "check_every": 4, "habit_updates": 2, "validation_problems": 8},
        "data": {"heldout_problems": 12},
        "evaluation": {"every_steps": 2},
        "checkpoint": {"every_steps": 2},
    }.items():
        c[area].update(values)
    return c
