"""An optimizer's state that went through JSON."""

import json
from collections import Counter

import torch

from hpcddp.train.parallel.optim_state import like


def test_what_went_through_json_gets_its_types_back():
    live = {
        "counted": Counter({3: 1, 8: 2}),
        "inner": [{"betas": (0.9, 0.99), "by_step": {0.5: None}}],
        "rate": torch.tensor(0.5, dtype=torch.float64),
        "empty": {},
        "last": 4,
    }
    text = json.dumps(live, default=lambda tensor: tensor.tolist())
    assert like(json.loads(text), live) == live
    other = {"counted": Counter({5: 1}), "inner": [], "rate": 0.1, "empty": {1: 2}, "last": 0}
    restored = like(json.loads(text), other)
    assert restored["counted"] == {3: 1, 8: 2} and type(restored["counted"]) is Counter
    assert restored["last"] == 4 and other["counted"] == {5: 1}
