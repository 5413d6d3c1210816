"""small-vl built from tiny packages of the same make: an ordinary Llava folder, alike in transformers and here."""

import functools
import importlib.util
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner
from PIL import Image, ImageDraw
from safetensors import safe_open
from transformers import AutoImageProcessor, LlavaForConditionalGeneration

from tests.models.parity import Case, assert_parity, drawing
from tests.models.test_image_families import chat
from triptych.cli import main
from triptych.core.config import Config, EngineConfig, ModelConfig
from triptych.core.errors import ForbiddenSource, InvalidMedia, InvalidRequest
from triptych.core.media import Modality
from triptych.engine import Engine
from triptych.models.registry import load_layout
from triptych.zoo import small_vl, small_vl_parts
from triptych.zoo.build import BUILDABLE, build_model
from triptych.zoo.llava_reference import LlavaReference

from .small_vl_packages import (
    tiny_language_model,
    tiny_tower,
    vocabulary,
    write_gguf,
    write_onnx,
    write_trained,
    write_wheel,
)


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """(packages, pins, tower, language model, trained tensors, their folder)"""
    folder = tmp_path_factory.mktemp("parts")
    tokens, merges = vocabulary()
    tower, language_model = tiny_tower(), tiny_language_model(len(tokens))
    write_onnx(folder / "a.onnx", tower)
    write_gguf(folder / "b.gguf", language_model, tokens, merges)
    packages = folder / "packages"
    pins = {
        "tower": write_wheel(packages, "odd-tower", "odd_tower/a.onnx", (folder / "a.onnx").read_bytes()),
        "language": write_wheel(packages, "odd-words", "odd_words/b.gguf", (folder / "b.gguf").read_bytes()),
    }
    trained = write_trained(folder / "trained")
    return packages, pins, tower, language_model, trained, folder / "trained"


@pytest.fixture(scope="module")
def built(parts, tmp_path_factory):
    """(folder, what progress was reported)"""
    packages, pins, _, _, _, trained = parts
    seen = []
    out = tmp_path_factory.mktemp("built") / "small-vl"
    small_vl.build(out, packages, lambda *step: seen.append(step), **pins, trained=trained)
    return out, seen


@pytest.fixture(scope="module")
def stock(built):
    model, found = LlavaForConditionalGeneration.from_pretrained(
        built[0], dtype=torch.float32, output_loading_info=True
    )
    assert not any(found.values())
    return model.eval()


def test_weights_are_those_of_the_packages(parts, stock):
    """Every tensor of tower and language model, in bfloat16; the low-rank change is added to the layer it names."""
    _, _, tower, language_model, trained, _ = parts
    made = stock.state_dict()
    for name, tensor in tower.state_dict().items():
        assert torch.equal(made[f"model.vision_tower.{name}"], tensor.bfloat16().float()), name
    changed = "layers.1.self_attn.k_proj"
    change = trained[f"{changed}.up"].float() @ trained[f"{changed}.down"].float()
    for name, tensor in language_model.model.state_dict().items():
        wanted = tensor + change if name == f"{changed}.weight" else tensor
        found = made[f"model.language_model.{name}"][: len(tensor)]
        assert torch.equal(found, wanted.bfloat16().float()), name
    assert torch.equal(
        made["model.multi_modal_projector.linear_1.weight"], trained["linear_1.weight"].bfloat16().float()
    )


def test_tower_sees_as_the_traced_one(parts, stock):
    """The stock tower that was traced and the one read back from its graph, on a picture of another size."""
    tower = parts[2]
    pixels = torch.randn(1, 3, 112, 112, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = tower(pixels).last_hidden_state
        actual = stock.model.vision_tower(pixels).last_hidden_state

    assert (expected - actual).abs().max() < 0.05  # bfloat16 weights


def test_greedy_equals_stock_generate(built, stock):
    """Through the server's model code: two pictures and two turns, text alone, token for token in float32."""
    folder = built[0]
    layout = load_layout(folder)

    def stock_inputs(prompt):
        pixels = [item.features["pixel_values"] for item in prompt.items]
        return {"pixel_values": torch.from_numpy(np.concatenate(pixels))} if pixels else {}

    words = layout.tokenizer
    first = chat(words, ("user", "image", "how many red"), ("assistant", "the"), ("user", "is the", "image"))
    pictures = [(Modality.IMAGE, drawing(*size, seed), None) for seed, size in enumerate(((90, 40), (64, 64)))]
    tokens = assert_parity(
        folder, stock, [Case(first, pictures), Case(chat(words, ("user", "how many")), [])], stock_inputs
    )

    assert len({token for answer in tokens for token in answer}) > 1


def test_a_picture_is_sixty_four_tokens_of_stock_pixels(built):
    layout = load_layout(built[0])
    decoded = drawing(90, 40)
    stock_processor = AutoImageProcessor.from_pretrained(built[0], backend="pil")

    expected = stock_processor(images=[Image.fromarray(decoded.pixels)], return_tensors="np")["pixel_values"]

    assert layout.image_size(40, 90, {}).num_embeds == 64
    assert np.array_equal(expected, layout.process(decoded, {}).features["pixel_values"])


def test_template_writes_turns_as_they_were_trained(built):
    words = load_layout(built[0]).tokenizer
    ids = chat(words, ("user", "image", "how many"), ("assistant", "the"), ("user", "red"))

    assert words.decode(ids) == (
        "<|im_start|>user\n<image>\nhow many<|im_end|>\n<|im_start|>assistant\nthe<|im_end|>\n"
        "<|im_start|>user\nred<|im_end|>\n<|im_start|>assistant\n"
    )


def test_progress_ends_and_the_card_is_there(built):
    folder, seen = built
    what, done, total = seen[-1]

    assert (what, done) == ("write", total)
    assert (folder / "README.md").read_text() == "# a card\n"
    assert not folder.with_name("small-vl.part").exists()


def test_parts_that_do_not_fit_are_refused(parts, tmp_path):
    """A projector for another tower; no folder is left."""
    packages, pins, *_ = parts
    write_trained(tmp_path / "trained", tower_width=48)

    with pytest.raises((InvalidMedia, RuntimeError)):
        small_vl.build(tmp_path / "out", packages, lambda *_: None, **pins, trained=tmp_path / "trained")

    assert not (tmp_path / "out").exists()


def test_a_graph_without_a_whole_backbone_is_refused(parts, tmp_path):
    """One layer's product left out of the graph, and a graph of something else: no random weights in their place."""
    graph = onnx.load(parts[0].parent / "a.onnx")
    nodes = [node for node in graph.graph.node if node.name != "/backbone/encoder/layer.1/mlp/fc2/MatMul"]
    del graph.graph.node[:]
    graph.graph.node.extend(nodes)
    onnx.save(graph, tmp_path / "part.onnx")
    with pytest.raises(InvalidMedia, match=r"missing_keys.*encoder\.layer\.1\.mlp\.fc2\.weight"):
        small_vl_parts.load_tower(tmp_path / "part.onnx")

    del graph.graph.node[:]
    onnx.save(graph, tmp_path / "part.onnx")
    with pytest.raises(InvalidMedia, match="no position embeddings"):
        small_vl_parts.load_tower(tmp_path / "part.onnx")


def test_a_changed_package_is_refused(parts, tmp_path):
    packages, pins, *_, trained = parts
    copy = tmp_path / "packages"
    copy.mkdir()
    for wheel in packages.glob("*.whl"):
        (copy / wheel.name).write_bytes(wheel.read_bytes() + b"\0")

    with pytest.raises(ForbiddenSource, match=r"odd_tower-1\.0-py3-none-any\.whl has sha256"):
        small_vl.build(tmp_path / "out", copy, lambda *_: None, **pins, trained=trained)

    assert not (tmp_path / "out").exists()


def test_a_mistyped_name_is_told_the_nearest():
    ended = CliRunner().invoke(main, ["models", "build", "smal-vl"])

    assert ended.exit_code == 1
    assert "did you mean 'small-vl'?" in ended.output


def test_a_folder_that_holds_something_is_kept(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")

    with pytest.raises(InvalidRequest, match="is not empty"):
        build_model("small-vl", tmp_path)

    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_a_missing_package_names_the_extra(tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "gguf" else found(name, *rest))

    with pytest.raises(InvalidRequest, match=r"needs gguf, .*pip install 'triptych\[zoo\]'"):
        build_model("small-vl", tmp_path / "out")


def test_command_builds_and_says_how_to_serve(parts, tmp_path, monkeypatch):
    """`triptych models build` with the tiny packages in place of the real ones."""
    packages, pins, *_, trained = parts
    monkeypatch.setattr(small_vl, "build", functools.partial(small_vl.build, **pins, trained=trained))

    ended = CliRunner().invoke(
        main, ["models", "build", "small-vl", "--out", str(tmp_path / "vl"), "--packages", str(packages)]
    )

    assert ended.exit_code == 0, ended.output
    assert f"triptych serve {tmp_path / 'vl'}" in ended.output.replace("\n", "")
    assert (tmp_path / "vl" / "model.safetensors").is_file()
    assert not (packages / "was-run").exists()


def test_builds_into_the_empty_folder_one_stands_in(parts, tmp_path, monkeypatch):
    packages, pins, *_, trained = parts
    monkeypatch.setattr(small_vl, "build", functools.partial(small_vl.build, **pins, trained=trained))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    built = build_model("small-vl", Path("."), packages)

    assert built.num_bytes > 0
    assert (tmp_path / "here" / "config.json").is_file()
    assert [entry.name for entry in tmp_path.iterdir()] == ["here"]


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    """Before anything is downloaded."""
    (tmp_path / "file").write_text("")

    with pytest.raises(InvalidRequest, match=r"small-vl cannot be built: (Not a directory|File exists): .*file"):
        build_model("small-vl", tmp_path / "file" / "small-vl")


def test_models_are_listed():
    ended = CliRunner().invoke(main, ["models"])

    assert ended.exit_code == 0
    assert {"tiny-vl", "tiny-image", *BUILDABLE} <= {line.split()[0] for line in ended.output.splitlines()}


def test_what_was_trained_is_small_and_fits_the_parts():
    """The committed projector joins 384 wide features to 576 wide words; each change is of a layer of the Llama."""
    for name, limit_bytes in (("projector", 3_000_000), ("low_rank", 8_000_000)):
        path = small_vl.TRAINED / f"{name}.safetensors"
        assert path.stat().st_size < limit_bytes
    with safe_open(small_vl.TRAINED / "projector.safetensors", "pt") as file:
        assert list(file.get_slice("linear_1.weight").get_shape()) == [576, 384]
        assert list(file.get_slice("linear_2.weight").get_shape()) == [576, 576]


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_the_real_one_sees_shape_and_colour_as_in_transformers(tmp_path):
    """Built from the index that pip is configured with: needs a network, 190 MB, a few minutes.

    The server's answers in float32 are those of stock `generate`, and most of them are right.
    """
    folder = build_model("small-vl", tmp_path / "small-vl", tmp_path / "packages").folder
    stock, right = LlavaReference(folder), 0
    served = Config(models=(ModelConfig(path=str(folder), engine=EngineConfig(dtype="float32")),))
    with Engine(config=served) as engine:
        for colour in ("red", "blue", "green", "yellow"):
            image = Image.new("RGB", (64, 64), (225, 220, 230))
            ImageDraw.Draw(image).rectangle((18, 22, 46, 40), fill=colour)
            image.save(tmp_path / "picture.png")
            for question, wanted in (("what color is the shape?", colour), ("is there a circle?", "no")):
                given = engine.ask(question, str(tmp_path / "picture.png")).text
                assert given == stock.answer(image, question)
                right += given == wanted

    assert right >= 6
