"""Answer SmolLM2's three safe prompts greedily and compare the ids with those of another run.

    python scripts/safe_prompts.py --out reference.json                      # on a CPU, float32
    python scripts/safe_prompts.py --model FILE.gguf --reference reference.json --out gpu.json

The prompts are those whose best token leads the second by enough that bfloat16 gives the ids of float32
(tests/parity/test_smollm2.py compares the CPU's ids with transformers').
"""

import argparse
import json
import sys
from pathlib import Path

import records

from jaxvllm import Engine, SamplingParams

PROMPTS = (
    ("Write a Python function that adds two numbers.", 32),
    ("Explain gravity in one sentence.", 32),
    ("What is the capital of France?", 8),
)


def main() -> int:
    """Exit code 1 if an id differs from the reference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder, GGUF file or hub id; the default model otherwise")
    parser.add_argument("--reference", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with Engine(args.model, max_model_len=1024, max_num_seqs=8, max_num_batched_tokens=512) as engine:
        params = [SamplingParams(temperature=0, max_tokens=n) for _, n in PROMPTS]
        conversations = [[{"role": "user", "content": prompt}] for prompt, _ in PROMPTS]
        outputs = [output.outputs[0] for output in engine.chat(conversations, params, use_tqdm=False)]
    answers = [
        {"prompt": prompt, "token_ids": list(output.token_ids), "text": output.text}
        for (prompt, _), output in zip(PROMPTS, outputs, strict=True)
    ]
    if args.reference:
        for answer, expected in zip(answers, json.loads(args.reference.read_text())["answers"], strict=True):
            answer["equal_to_reference"] = answer["token_ids"] == expected["token_ids"]
    print(json.dumps(answers, indent=1))
    if args.out:
        records.write(args.out, {"model": args.model, "answers": answers})
    return 0 if all(answer.get("equal_to_reference", True) for answer in answers) else 1


if __name__ == "__main__":
    sys.exit(main())
