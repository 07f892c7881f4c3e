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


BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."


def _pretrained(path: str) -> ml_collections.ConfigDict:
    """What the presets of instruction-tuned models on GSM8K have in common."""
    c = default.get_config()
    c.model.path = path
    c.warm_start.enabled = False
    c.data.name = "tfds/gsm8k"
    c.data.validation_split = "train[95%:]"
    c.data.train_split = "train[:95%]"
    c.data.template = "chat"
    c.data.question_format = "{question}" + BOXED
    c.data.overlong = "skip"
    c.data.heldout_problems = 1319
    c.reward.name = "math"
    c.rollout.max_prompt_length = 512
    c.rollout.max_response_length = 1536
    c.rollout.slots = 128
    c.rollout.chunk = 32
    c.rollout.queue_capacity = 4096
    c.trainer.steps = 200
    c.trainer.batch_prompts = 128
    c.trainer.minibatches = 4
    c.trainer.row_length = 4096
    c.trainer.remat = "full"
    c.optimizer.learning_rate = 1e-6
    c.optimizer.final_learning_rate = 1e-6
    c.optimizer.warmup_steps = 5
    c.mesh.trainer.update({"data": 1, "fsdp": -1})
    c.evaluation.every_steps = 20
    return c


def qwen2_5_0_5b() -> ml_collections.ConfigDict:
    """Qwen2.5-0.5B-Instruct on GSM8K.

    For 2 GPUs of 80 GiB, one each: trainer about 14 GiB, sampler about 13 GiB.
    """
    c = _pretrained("Qwen/Qwen2.5-0.5B-Instruct")
    c.trainer.micro_batch_rows = 2
    return c


def qwen2_5_1_5b() -> ml_collections.ConfigDict:
    """Qwen2.5-1.5B-Instruct on GSM8K.

    For 4 GPUs of 80 GiB: trainer fsdp 2, about 20 GiB each; two samplers of one GPU, about 29 GiB each.
    """
    c = _pretrained("Qwen/Qwen2.5-1.5B-Instruct")
    c.launch.samplers = 2
    c.trainer.micro_batch_rows = 2
    return c


def qwen3_1_7b() -> ml_collections.ConfigDict:
    """Qwen3-1.7B, which thinks before it answers, on GSM8K.

    For 8 GPUs of 80 GiB: trainer fsdp 4, about 12 GiB each; four samplers of one GPU, about 63 GiB each.
    """
    c = _pretrained("Qwen/Qwen3-1.7B")
    c.rollout.max_response_length = 3584
    c.rollout.slots = 56
    c.rollout.compaction = False  # its rows have no room beside the cache
    c.launch.samplers = 4
    c.trainer.micro_batch_rows = 1
    return c


def _areal(path: str) -> ml_collections.ConfigDict:
    """The hyper-parameters of AReaL's math runs (arXiv 2505.24298): 512 prompts x 16 answers, reward +-5, eta 8,
    four minibatches, Adam(0.9, 0.95, 1e-5) at a constant 2e-5 with decay 0.05, no KL, temperature 1.

    The paper generates up to 27,648 tokens; here the length is what fits without a fused loss over the vocabulary and
    with one dense cache row per slot. Set data.path to a file of problems in JSON lines.
    """
    c = _pretrained(path)
    c.data.name = "jsonl"
    c.data.question_key = "prompt"
    c.reward.correct = 5.0
    c.reward.incorrect = -5.0
    c.reward.workers = 4
    c.advantage.name = "batch_norm"
    c.rollout.max_staleness = 8.0
    c.rollout.compaction = False  # its rows have no room beside the cache
    c.rollout.group_size = 16
    c.rollout.max_prompt_length = 1024
    c.rollout.queue_capacity = 16384
    c.trainer.steps = 250
    c.trainer.batch_prompts = 512
    c.optimizer.learning_rate = 2e-5
    c.optimizer.final_learning_rate = 2e-5
    c.optimizer.warmup_steps = 1
    c.optimizer.b2 = 0.95
    c.optimizer.eps = 1e-5
    c.optimizer.weight_decay = 0.05
    c.optimizer.vocabulary_weight_decay = 0.05
    c.evaluation.every_steps = 25
    c.data.heldout_problems = 500
    return c


def r1_distill_qwen_1_5b() -> ml_collections.ConfigDict:
    """DeepSeek-R1-Distill-Qwen-1.5B as in the AReaL paper.

    For 8 GPUs of 80 GiB: trainer fsdp 4, about 18 GiB each; four samplers of one GPU, about 69 GiB each.
    """
    c = _areal("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B")
    c.rollout.max_response_length = 15360
    c.rollout.slots = 64
    c.trainer.row_length = 16384
    c.trainer.micro_batch_rows = 1
    c.launch.samplers = 4
    return c


def r1_distill_qwen_7b() -> ml_collections.ConfigDict:
    """DeepSeek-R1-Distill-Qwen-7B as in the AReaL paper.

    For 16 GPUs of 80 GiB, the roles started by hand: a trainer with fsdp 8, about 27 GiB each, and eight samplers of
    one GPU, about 69 GiB each.
    """
    c = _areal("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B")
    c.rollout.max_response_length = 7168
    c.rollout.slots = 24
    c.trainer.row_length = 8192
    c.trainer.micro_batch_rows = 1
    c.launch.samplers = 8
    return c


PRESETS = {
    "tiny": tiny,
    "tiny-skill": tiny_skill,
    "smollm2-135m": smollm2_135m,
    "qwen2.5-0.5b": qwen2_5_0_5b,
    "qwen2.5-1.5b": qwen2_5_1_5b,
    "qwen3-1.7b": qwen3_1_7b,
    "r1-distill-qwen-1.5b": r1_distill_qwen_1_5b,
    "r1-distill-qwen-7b": r1_distill_qwen_7b,
}


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
