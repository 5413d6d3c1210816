"""SmolVLM's clips: frames, words and pixels of the stock processor, and `generate`'s tokens over them."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.smolvlm import processing_smolvlm

from triptych.core.errors import InvalidRequest
from triptych.core.media import DecodedVideo, MediaHeader, MediaRef, Modality
from triptych.models.frames import FrameSampling
from triptych.models.registry import load_layout
from triptych.models.smolvlm_clips import plan_clip
from triptych.prompt.template import ChatTemplate

from .folders import spread_weights, write_folder
from .parity import Case, assert_parity, drawing
from .test_image_families import FAMILIES, TEXT, pictures

TILE_PX, EDGE_PX, EMBEDS = 32, 48, 4
SAMPLING = {"fps": 1, "max_frames": 6, "video_size": {"longest_edge": EDGE_PX}}
TIMES_S = (0.0, 1.0, 61.0)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The tiny SmolVLM of the other tests with a video processor's settings and the stock template."""
    family = FAMILIES["smolvlm"]
    words = family.tokenizer()
    words.chat_template = processing_smolvlm.DEFAULT_CHAT_TEMPLATE
    kind = transformers.SmolVLMForConditionalGeneration
    text = TEXT | dict(vocab_size=len(words), eos_token_id=words.eos_token_id, pad_token_id=words.pad_token_id)
    model = spread_weights(kind(kind.config_class(**family.config(text, words.convert_tokens_to_ids))))
    preprocessor = family.preprocessor | {"video_sampling": SAMPLING}
    folder = write_folder(tmp_path_factory.mktemp("smolvlm"), model, words, preprocessor=preprocessor)
    return folder, model, words


@pytest.fixture(scope="module")
def layout(served):
    return load_layout(served[0])


def header_of(num_frames, rate, duration_s=0.0):
    return MediaHeader(Modality.VIDEO, "video/mp4", 1, 60, 40, num_frames, rate, duration_s or num_frames / rate)


def clip(seed, times_s=TIMES_S):
    frames = np.stack([drawing(60, 40, seed + i).pixels for i in range(len(times_s))])
    return DecodedVideo(frames, np.array(times_s), 25.0)


def stock_sample_frames():
    """The method of the stock class, which itself needs torchvision."""
    file = Path(processing_smolvlm.__file__).with_name("video_processing_smolvlm.py")
    tree = ast.parse(file.read_text())
    (found,) = [node for node in ast.walk(tree) if getattr(node, "name", "") == "sample_frames"]
    found.args.args[1].annotation = None
    namespace = {"np": np}
    exec(compile(ast.Module([found], []), "stock", "exec"), namespace)
    return namespace["sample_frames"]


class Metadata(dict):
    """As VideoMetadata: fields by attribute and by key."""

    __getattr__ = dict.__getitem__


@settings(max_examples=200, deadline=None)
@given(
    num_frames=st.integers(1, 4000),
    rate=st.sampled_from([0.5, 1, 10, 23.976, 25, 30, 60]),
    fps=st.sampled_from([0.5, 1, 2]),
    most=st.integers(1, 64),
)
def test_frames_are_the_stock_ones(num_frames, rate, fps, most):
    """The same indices for every length and rate."""
    metadata = Metadata(fps=rate, duration=num_frames / rate, total_num_frames=num_frames)
    expected = stock_sample_frames()(SimpleNamespace(num_frames=most, fps=fps), metadata)

    plan = plan_clip(header_of(num_frames, rate), FrameSampling(frames_per_s=fps, min_frames=1, max_frames=most))

    assert list(expected) == list(plan.indices)


def stock_text(size):
    """What the stock processor writes for a clip."""
    own = SimpleNamespace(
        image_seq_len=EMBEDS,
        image_token="<image>",
        fake_image_token="<fake_token_around_image>",
        global_image_token="<global-img>",
    )
    *times_s, duration_s = size.times_s
    metadata = SimpleNamespace(fps=25, timestamps=list(times_s), duration=duration_s)
    inputs = {"pixel_values": np.zeros((1, len(times_s))), "video_metadata": [metadata]}
    return processing_smolvlm.SmolVLMProcessor.replace_video_token(own, inputs, 0)


@pytest.mark.parametrize(
    "content",
    [
        ["<video>", "how many red"],
        ["how many", "<video>"],
        ["how", "<video>", " many", "<video>", "the"],
        ["<video>", "<video>"],
        ["<video>", "<image>", "is the"],
    ],
)
def test_prompt_is_the_stock_processors(served, layout, content):
    """Words, times and pictures, token for token, also where the words share a token with the text beside them."""
    _, _, words = served
    size = layout.size(header_of(70 * 25, 25), {"num_frames": 3})
    picture = layout.size(MediaHeader(Modality.IMAGE, "image/png", 1, 30, 30), {"detail": "low"})
    stock = "<fake_token_around_image><global-img>" + "<image>" * EMBEDS + "<fake_token_around_image>"
    parts = [{"type": p.strip("<>")} if p.startswith("<") else {"type": "text", "text": p} for p in content]
    expected = words.apply_chat_template(
        [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
    )
    expected = expected.replace("<image>", stock).replace("<video>", stock_text(size))

    kinds = {"<video>": Modality.VIDEO, "<image>": Modality.IMAGE}
    refs = [MediaRef(kinds[p], b"") if p in kinds else {"type": "text", "text": p} for p in content]
    rendered = ChatTemplate(words, layout).render([{"role": "user", "content": refs}])
    sizes = [(part.modality, size if part.modality is Modality.VIDEO else picture) for part in rendered.parts]
    expanded = layout.expand(rendered.token_ids, sizes)

    assert words.encode(expected, add_special_tokens=False) == expanded.token_ids
    assert sum(s.num_embeds for _, s in sizes) == sum(span.length for span in expanded.spans)
    for span in expanded.spans:
        assert set(expanded.token_ids[span.start : span.end]) == {layout.image_token_id}
    assert [span.item_idx for span in expanded.spans] == sorted(span.item_idx for span in expanded.spans)


def test_words_of_a_caller_stay_words(served, layout):
    """`<image>` typed beside a clip makes no place for a picture."""
    _, _, words = served
    size = layout.size(header_of(50, 25), {"num_frames": 2})
    content = [MediaRef(Modality.VIDEO, b""), {"type": "text", "text": "<image> is <global-img> the"}]
    rendered = ChatTemplate(words, layout).render([{"role": "user", "content": content}])

    expanded = layout.expand(rendered.token_ids, [(Modality.VIDEO, size)])

    assert expanded.token_ids.count(layout.image_token_id) == size.num_embeds == 2 * EMBEDS


def test_frames_are_made_as_single_tiles_are(layout):
    """The stock image processor without splitting, at the clip's longest edge: the same floats."""
    made = layout.process(clip(3), {})
    stock = layout.image_processor.preprocess(
        [list(clip(3).frames)],
        do_image_splitting=False,
        size={"longest_edge": EDGE_PX},
        return_tensors="np",
    )

    assert made.size.num_embeds == len(TIMES_S) * EMBEDS
    assert np.array_equal(np.asarray(stock["pixel_values"])[0], made.features["pixel_values"])


def test_greedy_equals_generate(served, layout):
    """A clip between words, two clips, a clip and a picture in one conversation: token for token."""
    folder, model, words = served
    template = ChatTemplate(words, layout)
    size = layout.size(header_of(70 * 25, 25), {"num_frames": 3})

    def case(*content):
        kinds = {"video": Modality.VIDEO, "image": Modality.IMAGE}
        refs = [MediaRef(kinds[p], b"") if p in kinds else {"type": "text", "text": p} for p in content]
        rendered = template.render([{"role": "user", "content": refs}])
        media = [
            (Modality.VIDEO, clip(10 * index), size) if part.modality is Modality.VIDEO else pictures((50, 50))[0]
            for index, part in enumerate(rendered.parts)
        ]
        return Case(rendered.token_ids, media, {"detail": "low"})

    cases = [case("video", "how many red"), case("is", "video", "the", "video"), case("image", "video", "how")]

    def inputs(prompt):
        tiles = np.concatenate([item.features["pixel_values"] for item in prompt.items])
        return {"pixel_values": torch.from_numpy(tiles[None])}

    tokens = assert_parity(folder, model, cases, inputs)
    assert len({token for answer in tokens for token in answer}) > 1


def test_clip_options_are_checked(layout):
    """Frames by rate, by number and bounded by the model's own; a wrong value is named."""
    header = header_of(250, 25)
    assert layout.size(header, {}).grid == (6,)
    assert layout.size(header, {"num_frames": 3}).grid == (3,)
    assert layout.size(header, {"fps": 0.2}).grid == (2,)
    assert layout.size(header, {"max_frames": 4}).grid == (4,)
    assert len(layout.decode_spec(header, {}).times_s) == 6
    with pytest.raises(InvalidRequest, match="fps"):
        layout.size(header, {"fps": 0})
