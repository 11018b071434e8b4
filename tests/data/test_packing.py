import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gatedattn.config import ConfigError
from gatedattn.data.packing import Packed, Stream

BOS = 99
documents_st = st.lists(st.lists(st.integers(0, 9), max_size=12), min_size=1, max_size=8)


def pack(documents, seq_len, bos):
    packed = Packed(Stream.of([np.array(d, np.int32) for d in documents], BOS), seq_len, BOS, bos)
    return packed, packed.rows(np.arange(len(packed)))


@settings(max_examples=300, deadline=None)
@given(documents=documents_st, seq_len=st.integers(2, 9), bos=st.sampled_from(["document", "row"]))
def test_every_token_is_a_target_once_in_order(documents, seq_len, bos):
    packed, rows = pack(documents, seq_len, bos)
    in_loss = rows["targets"][rows["loss_mask"]].tolist()
    assert in_loss == [t for d in documents for t in (*d, BOS)]  # so the documents can be rebuilt from the rows, ends included
    assert packed.num_tokens == len(in_loss)


@settings(max_examples=300, deadline=None)
@given(documents=documents_st, seq_len=st.integers(2, 9), bos=st.sampled_from(["document", "row"]))
def test_segments_and_positions(documents, seq_len, bos):
    _, rows = pack(documents, seq_len, bos)
    assert {k: str(v.dtype) for k, v in rows.items()} == dict.fromkeys(
        ("tokens", "targets", "segment_ids", "positions"), "int32"
    ) | {"loss_mask": "bool"}
    at = np.arange(seq_len)
    for tokens, targets, mask, segments, positions in zip(
        *(rows[k] for k in ("tokens", "targets", "loss_mask", "segment_ids", "positions"))
    ):
        real = segments > 0
        assert real[0] and (np.diff(real.astype(int)) <= 0).all()  # padding only at the end
        assert not mask[~real].any() and (positions[~real] == 0).all() and (tokens[~real] == BOS).all()
        assert set(segments[real]) == set(range(1, segments.max() + 1)) and (np.diff(segments[real]) >= 0).all()
        for segment in set(segments[real]):
            inside = segments == segment
            assert (positions[inside] == at[: inside.sum()]).all()
            # Nothing crosses documents: BOS stands only at the head of a segment, and inside it each target is the next token.
            assert (tokens[inside][1:] != BOS).all()
            assert (targets[inside][:-1] == tokens[inside][1:]).all()
        assert (tokens[real & (segments > 1) & (positions == 0)] == BOS).all()
        if bos == "row":
            assert tokens[0] == BOS
            assert mask[1:][real[1:]].all()
        else:
            assert mask[real].all()


@settings(max_examples=100, deadline=None)
@given(documents=documents_st, seq_len=st.integers(2, 9), bos=st.sampled_from(["document", "row"]))
def test_every_token_is_seen_and_rows_are_independent(documents, seq_len, bos):
    packed, rows = pack(documents, seq_len, bos)
    shown = rows["tokens"][(rows["segment_ids"] > 0) & rows["loss_mask"]].tolist()
    if bos == "document":
        assert shown == [t for d in documents for t in (BOS, *d)]
    order = np.random.default_rng(0).permutation(len(packed))
    shuffled = packed.rows(order)
    assert all((shuffled[k] == rows[k][order]).all() for k in rows)


def test_the_example_of_the_docstring():
    _, rows = pack([[1, 2, 3], [4], [5, 6, 7, 8]], 4, "document")
    assert rows["tokens"].tolist() == [[BOS, 1, 2, 3], [BOS, 4, BOS, 5], [6, 7, 8, BOS]]
    assert rows["targets"].tolist() == [[1, 2, 3, BOS], [4, BOS, 5, 6], [7, 8, BOS, BOS]]
    assert rows["segment_ids"].tolist() == [[1, 1, 1, 1], [1, 1, 2, 2], [1, 1, 1, 0]]
    assert rows["positions"].tolist() == [[0, 1, 2, 3], [0, 1, 0, 1], [0, 1, 2, 0]]


def test_a_document_longer_than_a_row_with_row_bos():
    _, rows = pack([[1, 2, 3, 4, 5]], 3, "row")
    assert rows["tokens"].tolist() == [[BOS, 1, 2], [BOS, 3, 4], [BOS, 5, BOS]]
    assert rows["targets"].tolist() == [[1, 2, 3], [3, 4, 5], [5, BOS, BOS]]
    assert rows["loss_mask"].tolist() == [[True, True, True], [False, True, True], [False, True, False]]


def test_a_document_that_begins_in_the_last_slot_is_not_counted_twice():
    _, rows = pack([[1], [2]], 3, "row")  # BOS 1 BOS | BOS 2: the first BOS of the second row repeats the document's own
    assert rows["tokens"].tolist() == [[BOS, 1, BOS], [BOS, 2, BOS]]
    assert rows["loss_mask"].tolist() == [[True, True, True], [False, True, False]]


def test_rows_past_the_end_are_padding():
    packed, _ = pack([[1, 2]], 4, "row")
    rows = packed.rows(np.array([0, 7]))
    assert rows["segment_ids"][1].tolist() == [0] * 4 and not rows["loss_mask"][1].any()


def test_refusals():
    with pytest.raises(ConfigError, match="empty"):
        pack([], 4, "document")
    with pytest.raises(ConfigError, match="at least 2"):
        pack([[1]], 1, "row")
    assert len(pack([[1]], 1, "document")[0]) == 2
