"""Which runner is taken, and what is said about it: no crash and no wrong answer where the kernels cannot serve."""

import os
import stat
import threading

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.native.decoders import COMMON, llama, serve
from triptych.core.errors import InvalidRequest
from triptych.models.native import NativeUnavailable, accelerate, build
from triptych.models.native import choose as chooser


@pytest.fixture
def without_compiler(monkeypatch):
    def unavailable():
        raise NativeUnavailable("no C++ compiler on the path (looked for g++)")

    monkeypatch.setattr("triptych.models.native.decoder.load_library", unavailable)
    monkeypatch.setattr("triptych.models.native.tower.load_library", unavailable)


def test_auto_without_compiler_is_eager_with_the_reason(without_compiler):
    """The stock modules serve, and the choice says why."""
    served = serve(llama())
    chosen, choice = accelerate(served, "auto")

    assert chosen is served
    assert (choice.runner, choice.tower) == ("eager", "eager")
    assert "no C++ compiler" in choice.reason


def test_native_without_compiler_is_refused(without_compiler):
    """Who insists on the kernels gets an error that says why not."""
    with pytest.raises(InvalidRequest, match="no C\\+\\+ compiler"):
        accelerate(serve(llama()), "native")


def test_unknown_runner_is_refused():
    """The error lists the runners."""
    with pytest.raises(InvalidRequest, match="auto, eager, native"):
        accelerate(serve(llama()), "fast")


def test_eager_leaves_the_model_alone():
    """Asked for by name, the stock modules serve wherever a compiler is."""
    served = serve(llama())
    assert accelerate(served, "eager") == (served, chooser.Choice("eager", "asked for", tower_reason="asked for"))


def gemma2():
    return Gemma2ForCausalLM(Gemma2Config(**COMMON))


def odd_activation():
    return LlamaForCausalLM(LlamaConfig(**COMMON, hidden_act="relu"))


def narrow_heads():
    return LlamaForCausalLM(LlamaConfig(**COMMON | dict(head_dim=8)))


def mlp_biases():
    return LlamaForCausalLM(LlamaConfig(**COMMON, mlp_bias=True))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (gemma2, "Gemma2DecoderLayer"),
        (odd_activation, "'relu'"),
        (narrow_heads, "head_dim is 8"),
        (mlp_biases, "MLP has biases"),
        (lambda: llama().half(), "float16"),
    ],
)
def test_unknown_kinds_are_left_to_the_stock_modules(kind, reason):
    """Anything the kernels do not compute exactly is served eagerly, and named."""
    served = serve(kind())
    chosen, choice = accelerate(served, "auto")

    assert chosen is served
    assert choice.runner == "eager"
    assert reason in choice.reason


@pytest.mark.usefixtures("kernels")
def test_kernels_that_differ_are_not_taken(monkeypatch):
    """Were a stock layer to change its meaning, the check at the start finds it."""
    served = serve(llama())
    real = chooser.NativeDecoder.forward
    monkeypatch.setattr(chooser.NativeDecoder, "forward", lambda *args: real(*args) * 1.01)
    chosen, choice = accelerate(served, "auto")

    assert chosen is served
    assert "differs from the stock modules'" in choice.reason


def test_a_failing_compiler_is_named(tmp_path):
    """A compiler that cannot compile gives a reason, not a traceback, and leaves nothing behind."""
    fake = tmp_path / "g++"
    fake.write_text("#!/bin/sh\n[ \"$1\" = --version ] && exit 0\necho 'x.h:1: error: no such thing' >&2\nexit 1\n")
    fake.chmod(0o755)
    folder = tmp_path / "cache"
    with pytest.raises(NativeUnavailable, match="no such thing"):
        build.build(folder, str(fake))
    assert [path.name for path in folder.iterdir()] == ["lock"]


def test_a_folder_others_can_write_is_refused(tmp_path):
    """A library is code: it is not loaded from where another user could put one."""
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(NativeUnavailable, match="writable by"):
        build.build(folder, "g++")


def test_builders_at_the_same_time_compile_once(tmp_path):
    """Of several at once, one compiles and the others wait for its file."""
    fake, count = tmp_path / "g++", tmp_path / "count"
    fake.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\n'
        f'echo once >> {count}\nsleep 0.3\nwhile [ "$1" != -o ]; do shift; done\necho made > "$2"\n'
    )
    fake.chmod(0o755)
    folder, made = tmp_path / "cache", []
    threads = [threading.Thread(target=lambda: made.append(build.build(folder, str(fake)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(made) == 4
    assert len(set(made)) == 1
    assert count.read_text() == "once\n"
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700


def test_check_runs_under_bfloat16(kernels):
    """The check before the choice passes in bfloat16 too, with tiles where the CPU has them."""
    _, choice = accelerate(serve(llama().to(torch.bfloat16)), "auto")

    assert choice.runner == "native"
    assert choice.reason.endswith("kernels in bfloat16")
