"""A task that trains in a second, or as long as a test likes: each sample may take its time."""

TOY = """
import time
import torch
from torch import nn

def model():
    return nn.Linear(4, 2)

def dataset(split, size=64, pause=0.0):
    x = torch.randn(size, 4, generator=torch.Generator().manual_seed(0))
    return Pairs(x, (x.sum(1) > 0).long(), pause)

class Pairs(torch.utils.data.Dataset):
    def __init__(self, x, y, pause):
        self.x, self.y, self.pause = x, y, pause
    def __len__(self):
        return len(self.x)
    def __getitem__(self, i):
        time.sleep(self.pause)
        return self.x[i], self.y[i]

def loss(output, target):
    return nn.functional.cross_entropy(output, target)

def metrics(output, target):
    return {"accuracy": output.argmax(1) == target}
"""

# Several layers on four ranks: the last bit of a sum shows in which order it was added up.
DEEP = TOY.replace(
    "nn.Linear(4, 2)",
    """nn.Sequential(
        nn.Linear(4, 61), nn.ReLU(), nn.Dropout(0.1), nn.Linear(61, 37), nn.ReLU(),
        nn.Linear(37, 2),
    )""",
)
