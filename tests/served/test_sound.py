"""Sound over HTTP on a model of sound: `input_audio` and a URL by the openai client, as transformers answers."""

import base64
import io
import wave
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import openai
import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen2AudioForConditionalGeneration, WhisperFeatureExtractor

from tests.models.folders import stock_greedy, write_folder
from tests.models.tiny_audio import EXTRACTOR, RATE, SECONDS, tiny_audio
from triptych import launch
from triptych.core.config import Config, EngineConfig, HttpConfig, ModelConfig

NUM_NEW = 12


@dataclass
class Sounding:
    client: openai.OpenAI
    model: Qwen2AudioForConditionalGeneration
    words: PreTrainedTokenizerFast
    extractor: WhisperFeatureExtractor

    def answer(self, *parts: dict) -> openai.types.chat.ChatCompletion:
        return self.client.chat.completions.create(
            model="sound",
            messages=[{"role": "user", "content": [*parts, {"type": "text", "text": "how many"}]}],
            temperature=0,
            max_tokens=NUM_NEW,
            extra_body={"ignore_eos": True},
        )

    def stock_answer(self, *sounds: np.ndarray) -> str:
        """By transformers alone: its template, its extractor, its `generate`."""
        content = [*({"type": "audio"} for _ in sounds), {"type": "text", "text": "how many"}]
        ids = self.words.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, return_dict=False
        )
        found = self.extractor(
            list(sounds), sampling_rate=RATE, return_attention_mask=True, padding="max_length", return_tensors="pt"
        )
        audio_id = self.model.config.audio_token_index
        lengths = iter((found.attention_mask.sum(-1).sub(1).div(2, rounding_mode="floor").add(1) // 2).tolist())
        expanded = [part for one in ids for part in ([one] * (next(lengths) if one == audio_id else 1))]
        tokens = stock_greedy(
            self.model,
            NUM_NEW,
            input_ids=torch.tensor([expanded]),
            input_features=found.input_features,
            feature_attention_mask=found.attention_mask,
        )
        return self.words.decode(tokens, skip_special_tokens=True)


@pytest.fixture(scope="module")
def sounding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sounding]:
    model, words = tiny_audio()
    folder = write_folder(tmp_path_factory.mktemp("sound"), model, words, preprocessor=EXTRACTOR)
    one = ModelConfig(str(folder), name="sound", engine=EngineConfig(num_threads=1, kv_cache_bytes=2**20))
    with launch.background_server(Config(models=(one,), http=HttpConfig(port=0))) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        yield Sounding(client, model, words, WhisperFeatureExtractor.from_pretrained(Path(folder)))


def samples(num: int, seed: int) -> np.ndarray:
    """A tone that falls, as float32 of 16-bit steps, so that a WAV file holds it exactly."""
    rng = np.random.default_rng(seed)
    tone = 0.5 * np.sin(np.cumsum(np.linspace(rng.uniform(0.1, 0.4), 0.02, num))) + 0.02 * rng.standard_normal(num)
    return (tone * 32768).round().clip(-32768, 32767).astype(np.float32) / 32768


def wav(sound: np.ndarray) -> str:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(RATE)
        out.writeframes((sound * 32768).astype("<i2").tobytes())
    return base64.b64encode(file.getvalue()).decode()


def heard(sound: np.ndarray) -> dict:
    return {"type": "input_audio", "input_audio": {"data": wav(sound), "format": "wav"}}


def test_answer_about_sounds_is_that_of_transformers(sounding: Sounding):
    """One sound, another one, both in one message: word for word, and each its own answer."""
    low, high = samples(9_000, 1), samples(SECONDS * RATE, 2)
    expected = [sounding.stock_answer(low), sounding.stock_answer(high), sounding.stock_answer(low, high)]

    answers = [sounding.answer(heard(low)), sounding.answer(heard(high)), sounding.answer(heard(low), heard(high))]

    assert [answer.choices[0].message.content for answer in answers] == expected
    assert len(set(expected)) == 3


def test_a_url_gives_the_same_answer(sounding: Sounding):
    """`audio_url` with a data URL is the same sound."""
    sound = samples(20_001, 3)
    part = {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{wav(sound)}"}}

    assert sounding.answer(part).choices[0].message.content == sounding.stock_answer(sound)


def test_a_sound_that_is_too_long_is_refused_with_the_limit(sounding: Sounding):
    """The window of the tower is the limit; the next request is served."""
    with pytest.raises(openai.APIStatusError, match=r"max_audio_duration_s is 2, the request has 3"):
        sounding.answer(heard(samples(3 * RATE, 4)))

    assert sounding.answer(heard(samples(RATE, 5))).choices[0].message.content
