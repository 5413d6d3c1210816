"""Stock `generate`, in process, with a static batch: what one gets from transformers or OpenVINO without a server.

    python -m bench.stock transformers|openvino FOLDER [--dtype float32] [--quick]

Needs torch, transformers, numpy and Pillow alone (OpenVINO: optimum-intel too), so that it runs in a peer's own
environment. The last line of its output is the figures as JSON, in the form of `bench.summary`.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import time
from typing import Any

import torch
import transformers
from PIL import Image

from bench.work import WorkSpec, picture, question

NUM_OUTPUT_TOKENS = 64


class Stamps(transformers.StoppingCriteria):
    """Notes when each token was there; stops nothing."""

    def __init__(self) -> None:
        self.at_s: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.at_s.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def load(kind: str, folder: str, dtype: str) -> tuple[Any, Any]:
    processor = transformers.AutoProcessor.from_pretrained(folder)
    processor.tokenizer.padding_side = "left"
    processor.image_processor.do_image_splitting = False
    if kind == "openvino":
        from optimum.intel import OVModelForVisualCausalLM  # in its own environment only

        return OVModelForVisualCausalLM.from_pretrained(folder, ov_config=_openvino(dtype)), processor
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=getattr(torch, dtype))
    return model.eval(), processor


def _openvino(dtype: str) -> dict[str, Any]:
    return {"INFERENCE_NUM_THREADS": 2, "INFERENCE_PRECISION_HINT": {"bfloat16": "bf16", "float32": "f32"}[dtype]}


def ask(model: Any, processor: Any, spec: WorkSpec, first: int, batch: int) -> tuple[float, list[float]]:
    """One call of `generate` from JPEG bytes on. Seconds to each token, from the call's begin."""
    stamps = Stamps()
    numbers = range(first, first + batch)
    parts = [
        [*([] if spec.kind == "text" else [{"type": "image"}]), {"type": "text", "text": question(spec, n)}]
        for n in numbers
    ]
    jpegs = [] if spec.kind == "text" else [picture(spec, number) for number in numbers]
    begin_s = time.perf_counter()
    prompts = [
        processor.apply_chat_template([{"role": "user", "content": part}], add_generation_prompt=True) for part in parts
    ]
    options: dict[str, Any] = {"return_tensors": "pt", "padding": True}
    if jpegs:
        images = [[Image.open(io.BytesIO(jpeg)).convert("RGB")] for jpeg in jpegs]
        inputs = processor(text=prompts, images=images, **options)
        if isinstance(model, torch.nn.Module):
            inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
    else:
        inputs = processor.tokenizer(prompts, add_special_tokens=False, **options)
    assert inputs["input_ids"].shape[1] < 100, "a picture was split"
    with torch.inference_mode():
        model.generate(
            **inputs,
            max_new_tokens=spec.num_output_tokens,
            min_new_tokens=spec.num_output_tokens,
            do_sample=False,
            stopping_criteria=transformers.StoppingCriteriaList([stamps]),
        )
    return time.perf_counter() - begin_s, [at_s - begin_s for at_s in stamps.at_s]


def measure(model: Any, processor: Any, kind: str, seed: int, calls: int, batch: int) -> dict[str, Any]:
    spec = WorkSpec(kind, NUM_OUTPUT_TOKENS, seed=seed)
    runs = [ask(model, processor, spec, number * batch, batch) for number in range(calls)]
    wall_s = sum(total_s for total_s, _ in runs)
    ttft_ms = [stamps[0] * 1e3 for _, stamps in runs]
    tpot_ms = [(stamps[-1] - stamps[0]) / (len(stamps) - 1) * 1e3 for _, stamps in runs]
    return {
        "num_requests": calls * batch,
        "num_failed": 0,
        "errors": [],
        "ttft_ms": {"p50": round(statistics.median(ttft_ms), 2), "p99": round(max(ttft_ms), 2)},
        "tpot_ms": {"p50": round(statistics.median(tpot_ms), 2)},
        "requests_per_s": round(calls * batch / wall_s, 3),
        "tokens_per_s": round(calls * batch * NUM_OUTPUT_TOKENS / wall_s, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["transformers", "openvino"])
    parser.add_argument("folder")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(2)
    model, processor = load(args.kind, args.folder, args.dtype)
    measure(model, processor, "unique", 900_000, 1, 1)
    calls = 3 if args.quick else 6
    figures = {
        "single_unique": measure(model, processor, "unique", 10_000, calls, 1),
        "single_text": measure(model, processor, "text", 30_000, calls, 1),
        "eight_unique": measure(model, processor, "unique", 40_000, max(1, calls // 3), 8),
        "eight_text": measure(model, processor, "text", 50_000, max(1, calls // 3), 8),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
