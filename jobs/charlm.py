"""A small GPT that predicts the next character of Python's own manual.

The text is the one that ``help("topics")`` shows: 465,000 characters of English and Python code. On
the held-out tenth, a prediction from character frequencies has a loss of 3.24 nats; from the
character before, 2.32; from the two characters before, 1.73 (counted on the training part).

The model is a sequence of embedding, blocks and head, so it works with every strategy: blocks are
sharded (fsdp), their layers are divided (tp), or they are the parts of pipeline stages (pp).
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from hpcddp.errors import JobFileError

CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))  # any other is replaced by "?"


def model(
    layers: int = 4, width: int = 64, heads: int = 4, context: int = 64, dropout: float = 0.0
) -> nn.Sequential:
    """A GPT (Radford et al., 2019): [batch, length] -> [batch, length, 96].

    The input is character numbers, the output the logits of each next character.

    Args:
        layers: Number of blocks, at least 1.
        width: Size of a character's vector; a multiple of ``heads``.
        heads: Number of attention heads, at least 1; under tp a multiple of tp's size.
        context: Largest length of a sample in characters, at least 1.
        dropout: Dropout probability in each block, at least 0 and below 1.

    Raises:
        JobFileError: An argument is out of range.
    """
    _check_least_1("model", layers=layers, width=width, heads=heads, context=context)
    if width % heads:
        raise JobFileError(
            f"model.width is {width}, which is not a multiple of model.heads, {heads}",
            where="model.heads",
            hint=f"set model.width to a multiple of {heads}, such as {-(-width // heads) * heads}",
        )
    if isinstance(dropout, bool) or not (isinstance(dropout, int | float) and 0 <= dropout < 1):
        what = f"expected a number of at least 0 and below 1, got {dropout!r}"
        raise JobFileError(what, where="model.dropout")
    blocks = {f"block{i}": Block(width, heads, dropout) for i in range(layers)}
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, len(CHARACTERS)))
    made = nn.Sequential(OrderedDict(embed=Embed(context, width), **blocks, head=head))
    return made.apply(_start_small)


def dataset(split: str, context: int = 64) -> TensorDataset:
    """Consecutive pieces of the text: (characters [context], the next characters [context]), int64.

    Args:
        split: "train" for the first nine tenths of the text, "eval" for the last tenth.
        context: Characters of a piece, at most the model's ``context``.

    Raises:
        JobFileError: ``context`` is less than 1, or longer than the text.
    """
    _check_least_1("dataset", context=context)
    text = _text()
    begin = len(text) * 9 // 10
    part = text[begin:] if split == "eval" else text[:begin]
    if len(part) <= context:
        raise JobFileError(
            f"{context} characters are longer than the {split} part of the text ({len(part)})",
            where="dataset.context",
            hint="use a smaller number, at most model.context",
        )
    number = {character: i for i, character in enumerate(CHARACTERS)}
    numbers = torch.tensor([number.get(character, number["?"]) for character in part])
    used = (len(part) - 1) // context * context
    return TensorDataset(numbers[:used].view(-1, context), numbers[1 : used + 1].view(-1, context))


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy of the next character, in nats (a scalar)."""
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def metrics(output: Tensor, target: Tensor) -> dict[str, Tensor]:
    """The fraction of characters that are predicted correctly, for each sample: [batch]."""
    return {"accuracy": (output.argmax(2) == target).float().mean(1)}


def blocks(model: nn.Module) -> list[str]:
    """The modules that fsdp shards one by one."""
    return [name for name, part in model.named_children() if isinstance(part, Block)]


def tp_plan(model: nn.Module) -> dict[str, str]:
    """Each rank has some of the heads, and some units of the wide layer."""
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
    """The sum of a vector for each character and a vector for its position."""

    def __init__(self, context: int, width: int) -> None:
        super().__init__()
        self.character = nn.Embedding(len(CHARACTERS), width)
        self.place = nn.Embedding(context, width)

    def forward(self, characters: Tensor) -> Tensor:
        length, context = characters.shape[1], self.place.num_embeddings
        if length > context:
            raise JobFileError(
                f"samples have {length} characters, but model.context is {context}",
                where="dataset.context",
                hint="set model.context and dataset.context to the same number",
            )
        places = torch.arange(length, device=characters.device)
        return self.character(characters) + self.place(places)


class Block(nn.Module):
    """Attention, then two layers for each position; both are added to their input."""

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
    """Causal self-attention (Vaswani et al., 2017): [batch, length, width] -> the same shape."""

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
        """[batch, length, width] -> [batch, heads, length, size]; under tp this rank's heads."""
        if x.shape[2] % self.size:
            raise JobFileError(
                f"the ranks of tp cannot share the heads equally: {x.shape[2] / self.size:g} each",
                where="model.heads",
                hint="set model.heads to a multiple of the size of tp",
            )
        return x.unflatten(2, (-1, self.size)).transpose(1, 2)


def _start_small(module: nn.Module) -> None:
    """Small random weights, as in GPT-2: at the start all characters are equally likely."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


def _text() -> str:
    """The topics, sorted by name. Their text differs slightly between patch versions of Python."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise JobFileError(
            "the text is missing: this Python has no module pydoc_data",
            where="jobs/charlm.py",
            hint="use a complete Python; on Debian, install libpython3-stdlib",
        ) from None
    return "\n\n".join(topics[name] for name in sorted(topics))


def _check_least_1(table: str, **options: int) -> None:
    for name, value in options.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            what = f"expected a whole number of at least 1, got {value!r}"
            raise JobFileError(what, where=f"{table}.{name}")
