"""Precomputed embeddings: every wrong one refused by name and value, before anything could scatter it."""

import json
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from triptych.core.errors import BudgetExceeded, EmbeddingsRefused
from triptych.media.embeds import EmbedsHeader, read_embeds

REVISION = bytes(range(32))
META = {"model_revision": REVISION.hex(), "grid": "1, 4,8"}
VALUES = np.arange(24, dtype=np.float32).reshape(3, 8)


def read(data, **changes):
    wanted = {"embed_width": 8, "revision": REVISION, "max_embeds": 100, "max_bytes": 10_000, "param": "embeds"}
    return read_embeds(data, **(wanted | changes))


def file(values=VALUES, metadata=META, name="embeds"):
    return save({name: values}, metadata=metadata)


def raw_file(header, body=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def tensor(dtype="F32", shape=(3, 8), offsets=(0, 96), **extra):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **extra}


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_safetensors_are_read(dtype):
    """Values, grid and digest; the digest is of the values alone."""
    found = read(file(VALUES.astype(dtype)))

    assert (found.values == VALUES).all()
    assert found.values.dtype == np.float32
    assert (found.grid, found.num_embeds) == ((1, 4, 8), 3)
    assert found.digest == read(file(name="other")).digest
    assert found.digest != read(file(VALUES.reshape(3, 8) + 1)).digest
    assert read(file(VALUES[None])).digest == found.digest


def test_bfloat16_is_read():
    """The upper half of each float32."""
    body = (VALUES.view(np.uint32) >> 16).astype("<u2").tobytes()
    data = raw_file({"__metadata__": META, "x": tensor("BF16", offsets=(0, 48))}, body)
    assert (read(data).values == VALUES).all()


def test_raw_bytes_with_a_declared_header():
    """The same checks hold for numbers whose header comes beside them."""
    header = EmbedsHeader.declared("float32", [3, 8], META)
    assert (read(VALUES.tobytes(), header=header).values == VALUES).all()
    with pytest.raises(EmbeddingsRefused, match="takes 96 bytes, got 95"):
        read(VALUES.tobytes()[:-1], header=header)
    for shape in ("3,8", [3.0, 8], [True, 8], None):
        with pytest.raises(EmbeddingsRefused, match="whole numbers"):
            EmbedsHeader.declared("float32", shape, META)


def _nan():
    values = VALUES.copy()
    values[2, 5] = np.nan
    return file(values)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (file(VALUES[:, :7]), "8 wide, got 7"),
        (file(VALUES[:0]), "at least one"),
        (file(VALUES[0]), r"shape \[N, 8\], got \[8\]"),
        (file(VALUES.reshape(1, 1, 3, 8)), "shape"),
        (file(VALUES.astype(np.float64)), "dtype must be one of F32, F16, BF16, got 'F64'"),
        (file(VALUES.astype(np.int32)), "dtype"),
        (file(metadata=None), "no model_revision"),
        (file(metadata={"model_revision": "ff" * 32}), "this server runs"),
        (file(metadata={"model_revision": REVISION.hex()[:15]}), "this server runs"),
        (file(metadata={**META, "grid": "1,x"}), "grid"),
        (file(metadata={**META, "grid": "1,-2"}), "grid"),
        (_nan(), "embedding 2 holds a value that is not finite"),
        (file(np.full((3, 8), np.inf, np.float32)), "embedding 0"),
        (save({"a": VALUES, "b": VALUES}, metadata=META), "one tensor, it has 2"),
        (b"", "at least 8 bytes"),
        (b"\xff" * 8, "claims"),
        (b"\xff" * 40, "claims"),
        (pickle.dumps(VALUES), "claims"),
        (raw_file(b"{" * 50), "malformed"),
        (raw_file(b"[" * 5000), "malformed"),
        (raw_file({"x": tensor(), "__metadata__": {"a": 1}}), "malformed"),
        (raw_file({"x": tensor(offsets=(0, 95))}, b"\0" * 96), "claims bytes"),
        (raw_file({"x": tensor(offsets=(8, 96))}, b"\0" * 96), "claims bytes"),
        (raw_file({"x": tensor(offsets=(0, 2**40))}, b"\0" * 96), "claims bytes"),
        (raw_file({"x": tensor(shape=(2**40, 8)), "__metadata__": META}, b"\0" * 96), "at most 100"),
        (raw_file({"x": tensor(shape=(-3, 8)), "__metadata__": META}, b"\0" * 96), "at least one"),
        (raw_file({"x": tensor(evil=1)}, b"\0" * 96), "malformed"),
    ],
)
def test_wrong_embeddings_are_refused(data, message):
    """Shape, dtype, count, revision, offsets, finite values: the refusal says which, and names the field."""
    with pytest.raises(EmbeddingsRefused, match=message) as caught:
        read(data)
    assert caught.value.param == "embeds"


def test_counts_and_bytes_are_bounded():
    """The number that the picture takes, the most that can be taken, and bytes."""
    with pytest.raises(EmbeddingsRefused, match="4 embeddings belong here, got 3"):
        read(file(), num_embeds=4)
    with pytest.raises(EmbeddingsRefused, match="at most 2"):
        read(file(), max_embeds=2)
    with pytest.raises(BudgetExceeded) as caught:
        read(file(), max_bytes=50)
    assert (caught.value.limit, caught.value.param) == ("max_item_bytes", "embeds")


@given(st.binary(max_size=200), st.integers(0, 120), st.integers(0, 255))
def test_any_bytes_are_judged_without_a_crash(noise, at, byte):
    """Noise, and good files with noise in them, are read or refused."""
    good = bytearray(file())
    good[at % len(good)] = byte
    for data in (noise, bytes(good), bytes(good[:at]) + noise):
        try:
            found = read(data)
        except EmbeddingsRefused:
            continue
        assert found.values.shape[1] == 8
        assert np.isfinite(found.values).all()
