"""A model whose memory is known."""

TOY = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def model():
    print("made")
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

def dataset(split):
    return TensorDataset(torch.zeros(8, 64), torch.zeros(8, dtype=torch.long))

def loss(output, target):
    return nn.functional.cross_entropy(output, target)
"""
