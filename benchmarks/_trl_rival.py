"""GRPO updates on recorded completions through TRL's own trainer; run by ``against_trl.py`` in TRL's environment.

    .trl/bin/python benchmarks/_trl_rival.py TASK.json

The trainer is TRL's, but for one method: instead of generating and scoring, it returns the recorded completions,
advantages and old log-probs. Everything measured is TRL's: loss, backward, clipping and optimizer step.

The task (``against_trl.Task``) holds token ids, so no tokenizer is asked. Prints one JSON object: seconds (process CPU)
and loss of each update, and the peak resident set after the first, which also warms up.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from _peak import peak_resident_bytes, reset_peak
from datasets import Dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Recorded(GRPOTrainer):
    """TRL's trainer on recorded completions."""

    def __init__(self, updates: list[list[dict]], **options: object) -> None:
        super().__init__(**options)
        self._updates = iter(updates)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def _generate_and_score_completions(self, inputs):
        groups = next(self._updates)
        rows = [
            (group["prompt"], completion, advantage, old)
            for group in groups
            for completion, advantage, old in zip(
                group["completions"], group["advantages"], group["old_logprobs"], strict=True
            )
        ]
        assert len(rows) == len(inputs), "one dataset row per recorded completion"
        # All prompts and all completions of an update are of one length each, so nothing is padded.
        prompt = torch.tensor([row[0] for row in rows])
        completion = torch.tensor([row[1] for row in rows])
        self.losses.append(0.0)
        self._begin = time.process_time()
        return {
            "prompt_ids": prompt,
            "prompt_mask": torch.ones_like(prompt),
            "completion_ids": completion,
            "completion_mask": torch.ones_like(completion),
            "advantages": torch.tensor([row[2] for row in rows]),
            "old_per_token_logps": torch.tensor([row[3] for row in rows]),
            "num_items_in_batch": torch.tensor(completion.numel()),
        }

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        self.losses[-1] += float(loss.detach())
        return loss

    def update_done(self) -> None:
        """Take the time of an update; the first warmed up, and its peak does not count."""
        self.seconds.append(time.process_time() - self._begin)
        if len(self.seconds) == 1:
            reset_peak()


class AfterStep(TrainerCallback):
    """Tells the trainer when an optimizer step is done."""

    def __init__(self, trainer: Recorded) -> None:
        self._trainer = trainer

    def on_step_end(self, args, state, control, **kwargs):
        self._trainer.update_done()


def main() -> None:
    """Run the task."""
    task = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    size = len(task["updates"][0]) * len(task["updates"][0][0]["completions"])
    per_pass = task["sequences_per_pass"]
    model = AutoModelForCausalLM.from_pretrained(task["model"], dtype=torch.float32, attn_implementation="sdpa")
    model = PeftModel.from_pretrained(model, task["adapter"], is_trainable=True)
    config = GRPOConfig(
        output_dir=task["scratch"],
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=per_pass,
        gradient_accumulation_steps=size // per_pass,
        num_generations=len(task["updates"][0][0]["completions"]),
        max_steps=len(task["updates"]),
        learning_rate=task["lr"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=task["max_grad_norm"],
        optim="adamw_torch_fused",
        loss_type="grpo",
        epsilon=task["epsilon"],
        beta=0.0,
        gradient_checkpointing=task["recompute"],
        save_strategy="no",
        report_to=[],
        logging_strategy="no",
        disable_tqdm=True,
        max_completion_length=len(task["updates"][0][0]["completions"][0]),
    )
    trainer = Recorded(
        task["updates"],
        model=model,
        args=config,
        processing_class=AutoTokenizer.from_pretrained(task["model"]),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_list([{"prompt": "recorded"}] * (size * len(task["updates"]))),
    )
    trainer.add_callback(AfterStep(trainer))
    trainer.train()
    torch.save(
        {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad},
        task["weights"],
    )
    print(
        json.dumps({"seconds": trainer.seconds, "losses": trainer.losses, "peak_resident_bytes": peak_resident_bytes()})
    )


if __name__ == "__main__":
    main()
