"""Configuration files: what is accepted, and what every refusal says."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer_rank.errors import ConfigError
from trainer_rank.training.load_config import dump_config, key_list, load_config, parse_config

MINIMAL = "model: {path: m}\ndata: {path: d}\nsteps: 1\n"


def test_minimal_config_fills_in_every_default() -> None:
    """Model, data and a length are all a run needs."""
    config = parse_config(MINIMAL)
    assert config.model.lora is not None
    assert (config.loss.name, config.loss.normalisation) == ("sft", "token-mean")


def test_keys_are_pinned() -> None:
    """The keys a configuration may have are this list; a change to it is a change to the public face."""
    assert key_list() == [
        "model.path",
        "model.dtype",
        "model.recompute",
        "model.lora.rank",
        "model.lora.alpha",
        "model.lora.targets",
        "data.path",
        "data.eval_path",
        "data.train_on",
        "data.shuffle_seed",
        "loss.name",
        "loss.normalisation",
        "loss.epsilon_low",
        "loss.epsilon_high",
        "loss.kl_coefficient",
        "loss.advantages",
        "loss.beta",
        "loss.reference",
        "loss.function",
        "optimizer.lr",
        "optimizer.betas",
        "optimizer.weight_decay",
        "optimizer.max_grad_norm",
        "optimizer.schedule",
        "optimizer.warmup_steps",
        "optimizer.min_lr_ratio",
        "groups_per_step",
        "steps",
        "epochs",
        "eval_every",
        "checkpoint_every",
        "keep_checkpoints",
        "verify_every",
        "verify_requests",
        "tensorboard",
        "compare_one_by_one",
        "warm_up",
        "on_refuse",
        "max_packed_tokens",
        "pricing",
        "learned",
        "memory_budget",
        "threads",
        "seed",
        "run_dir",
    ]


@pytest.mark.parametrize("key", key_list())
def test_every_misspelt_key_is_refused_with_its_nearest_key(key: str) -> None:
    """A key with one letter missing is an error that suggests the key meant."""
    parents, _, name = key.rpartition(".")
    wrong = name[:-1] if name != "lr" else "lrr"
    text = f"{wrong}: 1"
    for parent in reversed(parents.split(".") if parents else []):
        text = f"{parent}: {{{text}}}"
    with pytest.raises(ConfigError) as caught:
        parse_config(text)
    dotted = f"{parents}.{wrong}" if parents else wrong
    assert f"unknown key '{dotted}'; did you mean '{key}'?" in str(caught.value)


def test_key_at_the_wrong_level_is_suggested_where_it_belongs() -> None:
    """``lr`` at the top names ``optimizer.lr``."""
    with pytest.raises(ConfigError, match=r"unknown key 'lr'; did you mean 'optimizer\.lr'\?"):
        parse_config(MINIMAL + "lr: 1e-4\n")


def test_key_like_no_other_lists_the_keys_there_are() -> None:
    """Without a near key the message lists what is valid at that level."""
    with pytest.raises(ConfigError, match=r"unknown key 'loss.zzz'; the keys here are name, normalisation"):
        parse_config(MINIMAL + "loss: {zzz: 1}\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps: '5'", "steps: must be a valid integer, got '5' of type str"),
        ("steps: true", "steps: must be a valid integer, got True of type bool"),
        ("steps: 0", "steps: must be greater than or equal to 1, got 0"),
        ("optimizer: {lr: .nan}", "optimizer.lr: must be finite"),
        ("optimizer: {lr: -0.001}", "optimizer.lr: must be greater than 0, got -0.001"),
        ("optimizer: {betas: [0.9, 1.0]}", "optimizer.betas.1: must be less than 1, got 1.0"),
        ("model: {path: m, dtype: fp8}", "model.dtype: must be 'float32' or 'bfloat16', got 'fp8'"),
        ("model: {path: m, lora: {targets: []}}", "model.lora.targets"),
        ("model: m", "model: must be a mapping of keys, got 'm' of type str"),
        (
            "loss: {name: ppo}",
            "loss.name: must be 'sft', 'cispo', 'grpo', 'ppo-clip', 'dpo' or 'custom', got 'ppo'",
        ),
        (
            "loss: {epsilon_low: 0.2}",
            "loss: epsilon_low belongs to the losses 'cispo', 'grpo' and 'ppo-clip', and name is 'sft'; leave it out",
        ),
        ("loss: {name: grpo, beta: 0.1}", "loss: beta belongs to the loss 'dpo', and name is 'grpo'"),
        ("loss: {name: dpo, kl_coefficient: 0.1}", "loss: kl_coefficient belongs to the loss 'grpo'"),
        ("loss: {name: cispo, advantages: group}", "loss: advantages belongs to the loss 'grpo'"),
        ("loss: {name: dpo, normalisation: token-mean}", "normalisation must be 'sequence-mean' or 'sum'"),
        ("loss: {name: grpo, reference: adapter-off}", "looked at by the penalty only, and kl_coefficient is 0"),
        ("loss: {name: custom}", "function must be 'module:function' or 'path/to/file.py:function'"),
        ("loss: {name: custom, function: mine.py}", "for the loss 'custom', got 'mine.py'"),
        ("loss: {function: 'mine.py:loss'}", "loss: function belongs to the loss 'custom', and name is 'sft'"),
        ("optimizer: {min_lr_ratio: 0.1}", "min_lr_ratio belongs to the schedules 'linear' and 'cosine'"),
        ("optimizer: {schedule: linear, min_lr_ratio: 2}", "optimizer.min_lr_ratio: must be less than or equal to 1"),
        ("keep_checkpoints: 0", "keep_checkpoints: must be greater than or equal to 1, got 0"),
        ("memory_budget: 2 gigs", "memory_budget: the value must be a number of bytes"),
        ("epochs: 2", "give exactly one of steps and epochs, got steps=1 and epochs=2"),
        ("eval_every: 2", "data.eval_path names no data"),
    ],
)
def test_a_broken_rule_names_key_rule_and_value(text: str, message: str) -> None:
    """Every refusal says which key, what must hold and what was given."""
    key = text.partition(":")[0]
    lines = [line for line in MINIMAL.splitlines() if line.partition(":")[0] != key]
    with pytest.raises(ConfigError) as caught:
        parse_config("\n".join([*lines, text]), name="run.yaml")
    assert message in str(caught.value)
    assert str(caught.value).startswith("run.yaml: ")


def test_all_faults_are_listed_at_once() -> None:
    """Two faults give two lines, so a config is corrected in one go."""
    with pytest.raises(ConfigError) as caught:
        parse_config("model: {path: m}\nsteps: 0\n")
    assert [line.split(": ")[1] for line in str(caught.value).splitlines()] == ["the key 'data' is required", "steps"]


def test_neither_steps_nor_epochs_is_refused() -> None:
    """A run has a length."""
    with pytest.raises(ConfigError, match="exactly one of steps and epochs"):
        parse_config("model: {path: m}\ndata: {path: d}\n")


def test_a_repeated_key_is_refused_with_its_line() -> None:
    """YAML libraries keep the last of two equal keys silently; here it is an error."""
    with pytest.raises(ConfigError, match=r"run\.yaml:4:1: is not valid YAML: the key 'steps' is given twice"):
        parse_config(MINIMAL + "steps: 2\n", name="run.yaml")


@pytest.mark.parametrize("text", ["", "- model", "42"])
def test_a_file_that_is_no_mapping_is_refused(text: str) -> None:
    """An empty file or a list is not a configuration."""
    with pytest.raises(ConfigError, match="must be a mapping of keys"):
        parse_config(text)


def test_broken_yaml_names_line_and_column() -> None:
    """A syntax error says where it is."""
    with pytest.raises(ConfigError, match=r"run\.yaml:2:\d+: is not valid YAML"):
        parse_config("model: {path: m}\ndata: {path: [}\n", name="run.yaml")


def test_yaml_cannot_construct_objects() -> None:
    """Tags that would run code are refused."""
    with pytest.raises(ConfigError, match="is not valid YAML"):
        parse_config("model: !!python/object/apply:os.getcwd []\n")


def test_missing_and_binary_files_are_refused(tmp_path: Path) -> None:
    """A path that cannot be read as text says so."""
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        load_config(tmp_path / "binary.yaml")


def test_a_number_in_scientific_notation_is_a_number() -> None:
    """YAML 1.1 reads 1e-3 as text; the configuration takes it for what it is."""
    assert parse_config(MINIMAL + "optimizer: {lr: 1e-3}\n").optimizer.lr == 1e-3


@pytest.mark.parametrize(
    "extra",
    [
        "",
        "memory_budget: 1.5GB\n",
        "threads: 2\n",
        "loss: {name: cispo, epsilon_low: 0.2, epsilon_high: 0.28}\n",
        "loss: {name: grpo}\n",
        "loss: {name: grpo, kl_coefficient: 1e-2, reference: adapter-off, advantages: group}\n",
        "loss: {name: ppo-clip}\n",
        "loss: {name: dpo}\n",
        "loss: {name: dpo, normalisation: sum, reference: adapter-off}\n",
        "loss: {name: custom, function: 'mine.py:loss'}\n",
    ],
)
def test_the_dumped_config_reads_back_equal(extra: str) -> None:
    """What a run folder records is a configuration that gives the same run."""
    config = parse_config(MINIMAL + extra)
    assert parse_config(dump_config(config)) == config


@pytest.mark.parametrize(
    ("loss", "defaults"),
    [
        ("sft", {"normalisation": "token-mean", "epsilon_low": None, "beta": None, "reference": None}),
        ("cispo", {"epsilon_low": 1.0, "epsilon_high": 4.0, "kl_coefficient": None, "advantages": None}),
        ("grpo", {"epsilon_low": 0.2, "epsilon_high": 0.2, "kl_coefficient": 0.0, "advantages": "given"}),
        ("grpo, kl_coefficient: 1e-2", {"kl_coefficient": 0.01, "reference": "given"}),
        ("ppo-clip", {"epsilon_low": 0.2, "epsilon_high": 0.2, "normalisation": "token-mean"}),
        ("dpo", {"beta": 0.1, "reference": "given", "normalisation": "sequence-mean"}),
    ],
)
def test_the_defaults_of_the_named_loss_are_filled_in(loss: str, defaults: dict[str, object]) -> None:
    """A run folder then records what was used, and options of other losses stay null."""
    section = parse_config(MINIMAL + f"loss: {{name: {loss}}}\n").loss
    assert {key: getattr(section, key) for key in defaults} == defaults


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("loss: {name: dpo, reference: adapter-off}\nmodel: {path: m, lora: null}\n", "nothing to turn off"),
        ("loss: {name: dpo}\ncompare_one_by_one: true\n", "one request at a time, and the loss 'dpo' needs pairs"),
    ],
)
def test_a_loss_that_cannot_be_had_is_refused(text: str, message: str) -> None:
    """The section is right by itself and wrong beside another one."""
    base = "data: {path: d}\nsteps: 1\n" + ("" if "model:" in text else "model: {path: m}\n")
    with pytest.raises(ConfigError, match=message):
        parse_config(base + text)


def test_full_fine_tuning_is_lora_null() -> None:
    """``lora: null`` survives the round trip instead of turning into the default adapter."""
    config = parse_config("model: {path: m, lora: null}\ndata: {path: d}\nepochs: 1\n")
    assert config.model.lora is None
    assert parse_config(dump_config(config)).model.lora is None


def test_the_demo_config_is_valid() -> None:
    """The configuration of ``make demo`` passes its own checks."""
    demo = Path(__file__).parents[3] / "examples" / "demo" / "config.yaml"
    assert load_config(demo).compare_one_by_one
