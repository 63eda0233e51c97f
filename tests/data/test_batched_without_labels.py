"""Whether an entry is one example or a batch does not depend on whether its labels are read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from ensbridge.data.loader import collect
from ensbridge.data.stream import Stream, collect_within, load_or_stream, views_differ

SEQUENCES, LABELS = torch.rand(20, 10, 4), torch.arange(20) % 3


class Sequences(Dataset):
    """Sequences (10, 4), one by one, each with its label."""

    def __len__(self) -> int:
        return len(SEQUENCES)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return SEQUENCES[index], int(LABELS[index])


KINDS: dict[str, Any] = {
    "loader of sequences": DataLoader(TensorDataset(SEQUENCES, LABELS), 19),  # its last batch has one
    "dictionary of sequences": {"features": SEQUENCES, "labels": LABELS},
    "dictionary of columns": {"age": SEQUENCES[:, 0, 0], "income": SEQUENCES[:, 0, 1], "labels": LABELS},
    "batches": [(SEQUENCES[:10], LABELS[:10]), (SEQUENCES[10:], LABELS[10:])],
    "sequences one by one": Sequences(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_labels_decide_the_same_read_or_not(kind: str) -> None:
    with_labels, without = (collect(KINDS[kind], labelled=labelled) for labelled in (True, False))
    assert len(with_labels) == len(without) == 20
    assert with_labels.shapes == without.shapes
    assert with_labels.labels is not None
    assert with_labels.labels.equal(LABELS)


@pytest.mark.parametrize("labelled", [True, False])
def test_a_stream_knows_a_batch_from_an_example(labelled: bool) -> None:
    stream = Stream(KINDS["loader of sequences"], labelled=labelled)
    assert (stream.length, stream.sample(20).shapes) == (20, [(10, 4)])


def test_views_are_those_that_a_collate_function_makes() -> None:
    texts = [("some words", 0), ("others", 1)] * 4

    def fixed(pairs: list[tuple[str, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.tensor([[len(text), ord(text[0])] for text, _ in pairs]).float()
        return tokens, torch.tensor([label for _, label in pairs])

    def noisy(pairs: list[tuple[str, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, labels = fixed(pairs)
        return tokens + torch.randn_like(tokens), labels

    loaders = [DataLoader(texts, 4, collate_fn=collate) for collate in (fixed, noisy)]  # type: ignore[arg-type]
    assert [views_differ(loader, "train") for loader in loaders] == [False, True]
    assert len(load_or_stream(loaders[0], "512MB", "train", print, labelled=False)) == 8  # type: ignore[arg-type]


def test_validation_that_does_not_fit_keeps_images_of_every_class() -> None:
    class Sorted(Dataset):
        def __len__(self) -> int:
            return 300

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            return torch.full((1, 4, 4), float(index)), index // 100

    said: list[str] = []
    kept = collect_within(Sorted(), (64 + 8) * 60, "val", said.append)
    assert kept.labels is not None
    assert (len(kept), set(kept.labels.tolist())) == (60, {0, 1, 2})
    assert "60" in said[0]
