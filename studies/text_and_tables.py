"""Text and tables: compress beside a control that was trained; docs/your-own-models.md has the table.

    python studies/text_and_tables.py 10

Ten seeds, each with data, a split and three members of its own. The control is made with the same options of
the first member and a copy of it. NLL of test examples, mean ± standard deviation over seeds.
"""

import copy
import sys

import torch
from sklearn.datasets import load_wine
from torch import Tensor, nn

import ensbridge as eb


class TextNet(nn.Module):
    """A tiny transformer of the shape of BertForSequenceClassification."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 32), nn.Linear(32, 2)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True) for _ in range(3))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits."""
        tokens = self.embedding(input_ids)
        for layer in self.layers:
            tokens = layer(tokens, src_key_padding_mask=attention_mask == 0)
        return self.head((tokens * attention_mask[..., None]).sum(1))


def sentences(count: int) -> tuple[dict[str, Tensor], Tensor]:
    """Whether the first word occurs more than twice; a tenth of the labels is wrong."""
    ids, lengths = torch.randint(1, 50, (count, 12)), torch.randint(6, 13, (count, 1))
    ids[:, 1:][torch.rand(count, 11) < 0.3] = 1
    mask = (torch.arange(12) < lengths).long()
    labels = ((ids * mask == 1).sum(1) > 2) ^ (torch.rand(count) < 0.1)
    return {"input_ids": ids * mask, "attention_mask": mask}, labels.long()


def mlp() -> nn.Module:
    """A network of wine's 13 columns."""
    first, second = (nn.Sequential(nn.Linear(size, 256), nn.ReLU()) for size in (13, 256))
    return nn.Sequential(*first, *second, nn.Linear(256, 3))


def run(kind: str, seed: int) -> list[float]:
    """NLL of one member, ensemble, model and control; the gain over the control; whether it is worth it."""
    torch.manual_seed(seed)
    rows, kinds = (torch.as_tensor(part) for part in load_wine(return_X_y=True))
    rows, order = ((rows - rows.mean(0)) / rows.std(0)).float(), torch.randperm(len(rows))
    wine = [(rows[part], kinds[part]) for part in order.split([90, 44, 44])]
    train, val, test = wine if kind == "wine" else [sentences(n) for n in (1000, 300, 1000)]
    nets = [mlp() if kind == "wine" else TextNet() for _ in range(3)]
    for number, net in enumerate(nets):
        rate = 1e-2 if kind == "wine" else 1e-3
        config = eb.FitConfig(epochs=10, batch_size=30, lr=rate, seed=10 * seed + number)
        eb.fit(eb.methods.DeepEnsemble([net]), train, config)
    options = {"budget": 1.5, "epochs": 20, "seed": seed, "quiet": True}
    control = eb.compress([nets[0], copy.deepcopy(nets[0])], train[0], val, **options)
    found = eb.compress(nets, train[0], val, **options).fidelity(test, members=nets, control=control)
    rows, gain = (found.source_row, found.ensemble_row, found.row), found.nll_gain_over_control
    assert gain is not None
    one, all_three, ours = (row.nll for row in rows if row is not None)
    return [one, all_three, ours, ours + gain, gain, found.worth_it]


if __name__ == "__main__":
    for kind in ("text", "wine"):
        table = torch.tensor([run(kind, seed) for seed in range(int(sys.argv[1]))])
        cells = [f"{x.mean():.4f} ± {x.std():.4f}" for x in table.T[:-1]]
        print(f"| {kind} | {' | '.join(cells)} | {int(table[:, -1].sum())} of {len(table)} |", flush=True)
