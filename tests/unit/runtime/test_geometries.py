"""The geometry of usual models, against the sizes that their makers publish."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from transformers import AutoConfig

from trainer_rank.errors import ConfigError
from trainer_rank.runtime.geometries import GEOMETRIES, Geometry, find_geometry
from trainer_rank.runtime.support import check_supported

# Billions of parameters as the model cards have them, embeddings included.
PUBLISHED = {
    "Llama-3.2-1B": 1.24, "Llama-3.2-3B": 3.21, "Llama-3.1-8B": 8.03, "Llama-3.1-70B": 70.6, "Llama-3.3-70B": 70.6,
    "Qwen2-0.5B": 0.494, "Qwen2-1.5B": 1.54, "Qwen2-7B": 7.62, "Qwen2-72B": 72.7,
    "Qwen2.5-0.5B": 0.494, "Qwen2.5-1.5B": 1.54, "Qwen2.5-3B": 3.09, "Qwen2.5-7B": 7.62, "Qwen2.5-14B": 14.8,
    "Qwen2.5-32B": 32.8, "Qwen2.5-72B": 72.7,
    "Qwen3-0.6B": 0.596, "Qwen3-1.7B": 1.72, "Qwen3-4B": 4.02, "Qwen3-8B": 8.19, "Qwen3-14B": 14.8, "Qwen3-32B": 32.8,
    "SmolLM2-135M": 0.135, "SmolLM2-360M": 0.362, "SmolLM2-1.7B": 1.71,
}  # fmt: skip


def parameters(one: Geometry) -> int:
    """Return the parameters of a geometry without its norms, which are fewer than the rounding of what is published."""
    attention = one.hidden_size * one.head_dim * (2 * one.num_attention_heads + 2 * one.num_key_value_heads)
    if one.model_type == "qwen2":
        attention += one.head_dim * (one.num_attention_heads + 2 * one.num_key_value_heads)
    layer = attention + 3 * one.hidden_size * one.intermediate_size
    return one.num_hidden_layers * layer + one.vocab_size * one.hidden_size * (1 if one.tie_word_embeddings else 2)


@pytest.mark.parametrize("name", sorted(GEOMETRIES))
def test_each_has_the_published_number_of_parameters_and_is_supported(name: str) -> None:
    """Every geometry of the table."""
    assert parameters(GEOMETRIES[name]) == pytest.approx(PUBLISHED[name] * 1e9, rel=0.005)
    geometry = asdict(GEOMETRIES[name])
    check_supported(AutoConfig.for_model(geometry.pop("model_type"), **geometry))


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "Llama-3.1-8B"),
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen2.5-7B"),
        ("Qwen/Qwen3-8B-Base", "Qwen3-8B"),
        ("smollm2-135m", "SmolLM2-135M"),
    ],
)
def test_each_is_found_under_the_names_people_use(name: str, found: str) -> None:
    """With an organisation, in lower case, with what tuning adds."""
    assert find_geometry(name) is GEOMETRIES[found]


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    """Not guessed."""
    with pytest.raises(ConfigError, match=r"got 'Qwen3-9B'; nearest: Qwen3-8B"):
        find_geometry("Qwen3-9B")
