from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_pipeline.base.fingerprints import Change, canonical, changes, fingerprint

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)
keys = st.dictionaries(st.text(min_size=1), json_values, max_size=5)


def test_a_known_key_keeps_its_fingerprint() -> None:
    # A change here makes every artifact of every user unreachable; it must be meant.
    key = canonical({"stage": "build", "schema": 1, "params": {"b": [1, 2.5, None], "a": "é"}})
    assert key == '{"params":{"a":"é","b":[1,2.5,null]},"schema":1,"stage":"build"}'
    assert fingerprint(key) == "6a65adc057bb0446899ba4b30f9ba7f7"


def test_what_cannot_be_written_raises_instead_of_hashing_to_a_constant() -> None:
    with pytest.raises(TypeError):
        canonical({"params": {"file": object()}})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="JSON"):
        canonical({"params": {"x": float("nan")}})


def test_changes_name_path_old_and_new() -> None:
    old = canonical({"params": {"max_batch_size": 4, "gone": True}, "inputs": {"checkpoint": "aa"}})
    new = canonical({"params": {"max_batch_size": 8, "added": None}, "inputs": {"checkpoint": "aa"}})
    assert changes(old, new) == (
        Change("params.added", None, "null"),
        Change("params.gone", "true", None),
        Change("params.max_batch_size", "4", "8"),
    )


@given(keys, keys)
def test_fingerprints_differ_exactly_when_something_is_named_as_changed(one: dict, other: dict) -> None:
    a, b = canonical(one), canonical(other)
    if fingerprint(a) == fingerprint(b):
        assert changes(a, b) == ()
    else:
        assert a != b


@given(keys)
def test_order_of_writing_does_not_matter(key: dict) -> None:
    assert canonical(dict(reversed(list(key.items())))) == canonical(key)
