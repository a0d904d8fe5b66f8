"""The next character of a text: a small GPT on the manual of Python that every Python carries.

The text is what ``help("topics")`` shows: 465,000 characters of English with Python in it. A guess
by the characters' frequencies alone has a loss of 3.24 nats on the held-out tenth, one by the
character before 2.32 and one by the two before 1.73 (counted on the training part).

The model is a plain sequence of embedding, blocks and head, so that each strategy finds its cuts:
a block is divided (fsdp), its layers are shared by ranks (tp), or it goes to a stage (pp).
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from hpcddp.errors import JobFileError

CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))  # all others are read as "?"


def model(
    layers: int = 4, width: int = 64, heads: int = 4, context: int = 64, dropout: float = 0.0
) -> nn.Sequential:
    """A GPT: characters' numbers [batch, length] -> [batch, length, 96], the next one's logits.

    Args:
        layers: blocks, 1 or more.
        width: of a character's vector; a multiple of heads.
        heads: of attention, 1 or more; with tp a multiple of its ranks.
        context: most characters that it looks at, 1 or more.
        dropout: part of each block's output that training leaves out, from 0 to below 1.
    """
    _check_least_1("model", layers=layers, width=width, heads=heads, context=context)
    if width % heads:
        raise JobFileError(
            f"width is {width}, which {heads} heads cannot share equally",
            where="model.heads",
            hint=f"take a multiple of {heads} for the width, such as {-(-width // heads) * heads}",
        )
    if isinstance(dropout, bool) or not (isinstance(dropout, int | float) and 0 <= dropout < 1):
        raise JobFileError(f"{dropout!r} is not a number from 0 to below 1", where="model.dropout")
    blocks = {f"block{i}": Block(width, heads, dropout) for i in range(layers)}
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, len(CHARACTERS)))
    made = nn.Sequential(OrderedDict(embed=Embed(context, width), **blocks, head=head))
    return made.apply(_start_small)


def dataset(split: str, context: int = 64) -> TensorDataset:
    """Pieces of the text, one behind the other: (characters [context], each one's next [context]).

    Args:
        context: characters of a piece, at most the model's.
    """
    _check_least_1("dataset", context=context)
    text = _text()
    begin = len(text) * 9 // 10
    part = text[begin:] if split == "eval" else text[:begin]
    if len(part) <= context:
        raise JobFileError(
            f"{context} characters are more than the text has: {len(part)} in its {split} part",
            where="dataset.context",
        )
    number = {character: i for i, character in enumerate(CHARACTERS)}
    numbers = torch.tensor([number.get(character, number["?"]) for character in part])
    used = (len(part) - 1) // context * context
    return TensorDataset(numbers[:used].view(-1, context), numbers[1 : used + 1].view(-1, context))


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Cross entropy of the next character, in nats: the mean over all places."""
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def metrics(output: Tensor, target: Tensor) -> dict[str, Tensor]:
    """The part of a piece's characters that the best guess gets right."""
    return {"accuracy": (output.argmax(2) == target).float().mean(1)}


def blocks(model: nn.Module) -> list[str]:
    return [name for name, part in model.named_children() if isinstance(part, Block)]


def tp_plan(model: nn.Module) -> dict[str, str]:
    """Each rank has some of the heads, and some of the wide layer's units."""
    layers = {
        "attention.query": "colwise",
        "attention.key": "colwise",
        "attention.value": "colwise",
        "attention.out": "rowwise",
        "mlp.up": "colwise",
        "mlp.down": "rowwise",
    }
    return {f"{block}.{name}": style for block in blocks(model) for name, style in layers.items()}


class Embed(nn.Module):
    """A vector for each character, and one for its place."""

    def __init__(self, context: int, width: int) -> None:
        super().__init__()
        self.character = nn.Embedding(len(CHARACTERS), width)
        self.place = nn.Embedding(context, width)

    def forward(self, characters: Tensor) -> Tensor:
        length, context = characters.shape[1], self.place.num_embeddings
        if length > context:
            raise JobFileError(
                f"the samples have {length} characters, but the model looks at {context}",
                where="dataset.context",
                hint="set model.context and dataset.context to the same number",
            )
        places = torch.arange(length, device=characters.device)
        return self.character(characters) + self.place(places)


class Block(nn.Module):
    """Attention, then two layers for each place; both add to what comes in."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            OrderedDict(
                up=nn.Linear(width, 4 * width), gelu=nn.GELU(), down=nn.Linear(4 * width, width)
            )
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Attention(nn.Module):
    """Each place looks at itself and those before (Vaswani et al., 2017)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = map(self._heads, (self.query(x), self.key(x), self.value(x)))
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(seen.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        """[batch, length, width] -> [batch, heads, length, size], with the heads that are here:
        under tp a rank has some of them."""
        if x.shape[2] % self.size:
            raise JobFileError(
                f"the ranks of tp cannot share the heads equally: {x.shape[2] / self.size:g} each",
                where="model.heads",
                hint="take a multiple of tp's size",
            )
        return x.unflatten(2, (-1, self.size)).transpose(1, 2)


def _start_small(module: nn.Module) -> None:
    """Small random weights, as in GPT-2: at first all characters are equally likely."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


def _text() -> str:
    """The topics by name: a patch version of Python changes some words of them."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise JobFileError(
            "the text is not here: this Python comes without pydoc_data",
            where="jobs/charlm.py",
            hint="take a whole Python; Debian has the text in libpython3-stdlib",
        ) from None
    return "\n\n".join(topics[name] for name in sorted(topics))


def _check_least_1(table: str, **options: int) -> None:
    for name, value in options.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise JobFileError(
                f"{value!r} is not a whole number from 1 on", where=f"{table}.{name}"
            )
