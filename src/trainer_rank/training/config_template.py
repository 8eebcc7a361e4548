"""A commented configuration made from the configuration's own classes: every key, its meaning, its default."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, get_args, get_origin

from pydantic import BaseModel

from trainer_rank.training.config import TrainConfig
from trainer_rank.training.load_config import section_in

# One line per key and per section; a test holds it to the keys there are.
MEANING: Final[Mapping[str, str]] = {
    "model": "The model that is trained.",
    "model.path": "Folder with config.json, weights and tokenizer.",
    "model.dtype": "Of the parameters.",
    "model.recompute": "full keeps each layer's input only, none all activations, auto as many as fit.",
    "model.lora": "Low-rank adapters; null instead of this section trains every weight.",
    "model.lora.rank": "Rank of the adapters.",
    "model.lora.alpha": "Scale; an adapter's output is multiplied by alpha / rank.",
    "model.lora.targets": "Layers that get one: a list of names, all-linear or attention; null: every projection.",
    "data": "What it is trained on; see docs/data.md.",
    "data.path": "JSON Lines or Parquet file: token ids, messages, or prompt and completion.",
    "data.eval_path": "The same, for a loss that is measured before and after.",
    "data.train_on": "Assistant messages of a conversation that are trained.",
    "data.shuffle_seed": "Order of the groups; null keeps the file's.",
    "loss": "What is minimised.",
    "loss.name": "Each with its formula, defaults and data in docs/losses.md.",
    "loss.normalisation": "What the sum over the step is divided by, however the step is split.",
    "loss.epsilon_low": "Lower bound of the importance weight is 1 - epsilon_low; null: cispo 1, the others 0.2.",
    "loss.epsilon_high": "Upper bound of the importance weight is 1 + epsilon_high; null: cispo 4, the others 0.2.",
    "loss.kl_coefficient": "grpo: penalty on leaving the reference; null: 0.",
    "loss.advantages": "grpo: given in the data, or computed from reward within each group; null: given.",
    "loss.beta": "dpo: how strongly the reference holds back; null: 0.1.",
    "loss.reference": "dpo and a penalty of grpo: given in the data, or adapter-off; null: given.",
    "loss.function": "custom: module:function or path/to/file.py:function.",
    "optimizer": "AdamW.",
    "optimizer.lr": "Learning rate after the warm-up.",
    "optimizer.betas": "Decay of the moments.",
    "optimizer.weight_decay": "Decoupled from the gradient.",
    "optimizer.max_grad_norm": "Gradients are scaled down to this norm.",
    "optimizer.schedule": "How the learning rate goes on after the warm-up.",
    "optimizer.min_lr_ratio": "Where linear and cosine end, as a share of lr.",
    "optimizer.warmup_steps": "Steps over which the learning rate rises linearly.",
    "groups_per_step": "Groups in one optimizer step.",
    "steps": "Length of the run in optimizer steps; give this or epochs.",
    "epochs": "Length of the run in passes over the data; give this or steps.",
    "eval_every": "Evaluate after every so many steps as well.",
    "checkpoint_every": "Write a checkpoint after every so many steps; null: at the end only, and when interrupted.",
    "keep_checkpoints": "Checkpoints that are kept, newest first.",
    "verify_every": "Run some requests alone after every so many steps and log how far their numbers differ.",
    "verify_requests": "How many.",
    "tensorboard": "Write the figures for TensorBoard into the run folder.",
    "on_refuse": "A request that cannot fit: raise stops the run, skip leaves it out and counts it.",
    "max_packed_tokens": "Hard cap on the packed rows of one pass; null: memory decides.",
    "pricing": "How passes are priced: from traces of their code, or by bytes per row learned from passes.",
    "learned": "What observed passes teach of memory: shared with other runs of yours, or kept in this run.",
    "compare_one_by_one": "At the end, train the smallest group one request at a time and report the speed-up.",
    "warm_up": "worst runs the request that needs most memory before the first step, without training.",
    "memory_budget": "All bytes on the device, weights included, such as 20GiB; null: what the device can give.",
    "threads": "CPU threads; null: torch's own choice.",
    "seed": "Seed of the adapter's initial weights.",
    "run_dir": "Where numbered run folders go.",
}

# What no default can know: a length, and the two paths.
_START: Final = {"model": {"path": "models/my-model"}, "data": {"path": "data/train.jsonl"}, "epochs": 1}


def config_template() -> str:
    """Return YAML that ``parse_config`` reads, with every key of ``key_list`` in its section under its meaning."""
    lines = ["# A training run. Start it with: trainer-rank train <this file>", ""]
    values = TrainConfig.model_validate(_START).model_dump(mode="json")
    lines += _section(TrainConfig, values, prefix="", indent="")
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"


def _section(section: type[BaseModel], values: Mapping[str, Any], *, prefix: str, indent: str) -> Iterator[str]:
    for name, field in section.model_fields.items():
        key, value = f"{prefix}{name}", values[name]
        nested = section_in(field.annotation)
        choices = " Choices: " + ", ".join(_choices(field.annotation)) + "." if _choices(field.annotation) else ""
        required = " Required." if field.is_required() and nested is None else ""
        if nested is not None and not indent:
            yield ""
        yield f"{indent}# {MEANING[key]}{choices}{required}"
        if nested is None:
            yield f"{indent}{name}: {_scalar(value)}"
            continue
        yield f"{indent}{name}:"
        yield from _section(nested, value, prefix=f"{key}.", indent=f"{indent}  ")
        if not indent:
            yield ""


def _choices(annotation: object) -> list[str]:
    """Return the texts of a field that takes one of a few; empty for other fields, and for texts among other kinds."""
    return [str(choice) for choice in get_args(annotation)] if get_origin(annotation) is Literal else []


def _scalar(value: object) -> str:
    """Return a value as YAML on one line; JSON is YAML, and a plain word needs no quotes."""
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z][\w./-]*", value) and value not in ("null", "true", "false"):
        return value
    return json.dumps(value)
