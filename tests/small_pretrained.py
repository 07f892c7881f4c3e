"""A run of seconds of a pretrained model on problems in a file; the test says where they lie."""

from configs import default


def get_config():
    c = default.get_config()
    c.preset = "small-pretrained"
    c.warm_start.enabled = False
    c.data.update(
        {"name": "jsonl", "template": "chat", "system_prompt": "add", "question_format": "{question} =",
         "overlong": "skip", "heldout_problems": 12}
    )  # fmt: skip
    c.reward.update({"name": "math", "correct": 2.0, "incorrect": -1.0})
    c.rollout.update(
        {"slots": 16, "group_size": 4, "queue_capacity": 64, "max_prompt_length": 64, "max_response_length": 12,
         "stop_strings": ("0", "1"), "chunk": 4}
    )  # fmt: skip
    c.trainer.update({"batch_prompts": 4, "micro_batch_rows": 4, "steps": 3})
    c.loss.entropy_coefficient = 0.1  # a random model may give no right answer: something to learn all the same
    c.optimizer.learning_rate = 1e-3
    c.evaluation.every_steps = 2
    c.checkpoint.every_steps = 2
    return c
