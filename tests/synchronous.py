"""Plain synchronous RL, without admission, ledger, queue, channel or versions: the reference for max_staleness 0.

    python -m tests.synchronous OUTPUT.npz --config=tests/small_config.py ...

Draws a whole batch under fixed parameters, updates, repeats; saves the final parameters. It shares the engine and the
train step with the program (a slot is filled in the same order), and nothing of what makes the program asynchronous.
"""

import pathlib
import sys

import jax
import numpy as np

from areal_jax import main, train
from areal_jax.data.prompts import PromptStream, RecordStream
from areal_jax.rollout.engine import Engine
from areal_jax.rollout.sampler import capacity
from areal_jax.rollout.schedule import Request
from areal_jax.types import PolicySnapshot


def run(output, argv):
    config, _ = main._parse([sys.argv[0], *argv])
    parts = train._build(config, pathlib.Path(output).parent)
    learner, program, grader = parts.learner, parts.program, parts.grader
    params = train._warm_start(config, parts, lambda record: None, None).params
    state = learner.init_state(params)
    r = config.rollout
    stream = RecordStream(parts.sources["train"], config.seed)
    next_problem = PromptStream(stream, parts.template, r.max_prompt_length, False)
    next_prompt = 0
    engine = None
    for version in range(config.trainer.steps):
        fixed = jax.tree.map(lambda x: jax.device_put(x, x.sharding, may_alias=False), state.params)
        engine = engine or Engine(program, PolicySnapshot(version, fixed), config.seed)
        engine.set_params(PolicySnapshot(version, fixed))
        batch, prompts, left = [], {}, config.trainer.batch_prompts
        while left or engine.unfinished:
            room = capacity(r.slots) - engine.unfinished
            while room > 0 and left:
                prompt, _ = next_problem()
                ids = range(next_prompt * r.group_size, (next_prompt + 1) * r.group_size)
                engine.submit([Request(i, prompt.tokens, r.max_response_length, r.temperature) for i in ids])
                prompts |= dict.fromkeys(ids, prompt)
                next_prompt, left, room = next_prompt + 1, left - 1, room - r.group_size
            done = engine.step()
            batch += [grader(prompts[c.request.sample_id], c, False).result()[0] for c in done]
        batch.sort(key=lambda t: t.sample_id)
        state, _ = learner.step(state, batch, version)
    np.savez(output, *map(np.asarray, jax.tree.leaves(state.params)))


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2:])
