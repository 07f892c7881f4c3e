"""One process of a trainer that takes two steps: `python -m tests.trainer_process ADDRESS N I DIRECTORY`.

Process I of N, which have two devices together (fsdp 2); batches come from process 0. All save a checkpoint, publish
weights, and process 0 writes the metrics to DIRECTORY/metrics.json.
"""

import json
import pathlib
import sys

import jax
import numpy as np

from areal_jax.launch.cluster import Cluster


def run(host, directory):
    from areal_jax import sharding
    from areal_jax.learner import Learner
    from areal_jax.models.transformer import build_model
    from areal_jax.trainer.checkpoint import Checkpoints
    from areal_jax.transport.broadcast import Broadcast, receive_batch, share_batch
    from areal_jax.transport.messages import Limits
    from areal_jax.transport.weights import OrbaxChannel
    from areal_jax.types import PolicySnapshot
    from configs import default
    from tests.helpers import TINY, trajectory

    c = default.get_config()
    c.rollout.update({"max_prompt_length": 4, "max_response_length": 12, "group_size": 4})
    c.trainer.update({"batch_prompts": 6, "row_length": 32, "micro_batch_rows": 2, "minibatches": 2})
    c.advantage.name, c.critic.kind = "gae", "head"
    c.reward.kl_coefficient = 0.1
    c.optimizer.eps = 1e-3
    model = build_model(TINY, sharding.make_mesh({"data": 1, "fsdp": 2}))
    broadcast = Broadcast(host) if jax.process_count() > 1 else None
    made, checkpoints = Learner(c, model), Checkpoints(directory / "checkpoints")
    reference, state = model.init_params(0), made.init_state(model.init_params(0))
    checkpoints.save_reference(reference)
    channel, rng, metrics = OrbaxChannel(directory / "weights"), np.random.default_rng(0), []
    for version in range(2):
        if broadcast is None or broadcast.leads:
            batch = [trajectory(24 * version + i, 2 + i % 3, 3 + i % 7, rng) for i in range(24)]
            share_batch(broadcast, batch)
        else:
            batch = receive_batch(broadcast, Limits(1 << 20, 64))
        state, found = made.step(state, batch, version, reference)
        metrics.append({k: v for k, v in found.items() if np.isscalar(v)})
        channel.publish(PolicySnapshot(version + 1, state.params))
    checkpoints.save(2, state, {"said": "by process 0"})
    again, books = checkpoints.restore(2, made.init_state(model.init_params(5)))
    same = jax.tree.map(lambda a, b: bool((sharding.fetch(a) == sharding.fetch(b)).all()), again, state)
    assert all(jax.tree.leaves(same))
    assert books == {"said": "by process 0"}
    if jax.process_index() == 0:
        (directory / "metrics.json").write_text(json.dumps(metrics))
    if broadcast is not None:
        broadcast.close()


if __name__ == "__main__":
    address, processes, index, directory = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", 2 // int(processes))
    cluster = Cluster(address if processes != "1" else "", int(processes), int(index))
    cluster.join()
    run(cluster.host, pathlib.Path(directory))
