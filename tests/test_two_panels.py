"""One server with a model that answers and a model that draws: both through the stock client, on one port."""

import base64
import io

import numpy as np
import openai
import pytest
from PIL import Image

from tests.http.tiny_folder import make_tiny_text
from triptych.core.config import Config, GenerateConfig, HttpConfig, ModelConfig
from triptych.launch import background_server
from triptych.testing.toy_diffusion import make_diffusion_folder


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    text = ModelConfig(path=str(make_tiny_text(root / "tiny-text")))
    pictures = ModelConfig(
        path=str(make_diffusion_folder("pixart", root / "pictures")), generate=GenerateConfig(warm_up=False)
    )
    config = Config(models=(text, pictures), http=HttpConfig(port=0, access_log=False))
    with (
        background_server(config, in_process=True) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield client


def test_models_lists_both(client):
    """`/v1/models` says what each is for."""
    assert {model.id for model in client.models.list()} == {"tiny-text", "pictures"}
    assert "text-to-image" in client.models.retrieve("pictures").tasks


def test_one_answers_and_the_other_draws(client):
    """Each model is found by its name, and asking the wrong one is told so."""
    chat = client.chat.completions.create(model="tiny-text", messages=[{"role": "user", "content": "hi"}], max_tokens=4)
    image = client.images.generate(
        model="pictures", prompt="a red circle", size="32x32", extra_body={"num_inference_steps": 2, "seed": 1}
    )
    with pytest.raises(openai.NotFoundError, match="no model 'tiny-text' draws here"):
        client.images.generate(model="tiny-text", prompt="a red circle")

    assert chat.usage.completion_tokens >= 1
    assert Image.open(io.BytesIO(base64.b64decode(image.data[0].b64_json))).size == (32, 32)


def test_embeddings_have_length_one_and_tell_texts_apart(client):
    """Any decoder gives its last hidden state; equal texts give equal vectors."""
    answer = client.embeddings.create(model="tiny-text", input=["a cat", "a dog", "a cat"], encoding_format="float")
    vectors = np.array([datum.embedding for datum in answer.data])

    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(vectors[0], vectors[2], atol=1e-5)
    assert np.abs(vectors[0] - vectors[1]).max() > 1e-3
