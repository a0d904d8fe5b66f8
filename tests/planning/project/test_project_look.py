from pathlib import Path

import pytest

from hpcddp.planning.project import project_look

DDP = "import torch.distributed as dist\ndist.init_process_group('gloo')\n"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (DDP, "DDP"),
        ("from torch.nn.parallel import DistributedDataParallel as DDP\nDDP(1)\n", "DDP"),
        ("import lightning as L\nL.Trainer().fit(1)\n", "Lightning"),
        ("from pytorch_lightning import Trainer\nTrainer()\n", "Lightning"),
        ("from accelerate import Accelerator\nAccelerator()\n", "Accelerate"),
        ("from transformers import Trainer\nTrainer()\n", "transformers"),
        ("import horovod.torch as hvd\nhvd.init()\n", "Horovod"),
        ("import torch\nif __name__ == '__main__':\n    torch.ones(1)\n", "torch"),
        ("def model(): ...\ndef dataset(split): ...\ndef loss(a, b): ...\n", "task"),
    ],
)
def test_what_a_script_trains_with(tmp_path: Path, text: str, kind: str) -> None:
    (tmp_path / "a.py").write_text(text)
    (row,) = project_look.candidates(tmp_path)
    assert (str(row.path), row.kind, row.command) == ("a.py", kind, ["python", "a.py"])


@pytest.mark.parametrize(
    "text",
    [
        '"""A library."""\nimport torch\n\n\ndef f(): ...\n',
        "print('no torch')\n",
        "import torch\nthis is no python\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n",
    ],
)
def test_what_does_not_train_is_no_candidate(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.py").write_text(text)
    assert project_look.candidates(tmp_path) == []


def test_the_likeliest_comes_first(tmp_path: Path) -> None:
    for name in ("zoo.py", "main.py", "train_gpt.py", "sub/train.py", "tests/train.py",
                 ".venv/train.py", "sub/deep/er/train.py"):  # fmt: skip
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(DDP)
    (tmp_path / "train_one.py").write_text("import torch\ntorch.ones(1)\n")
    rows = [str(row.path) for row in project_look.candidates(tmp_path)]
    assert rows == ["train_gpt.py", "sub/train.py", "main.py", "zoo.py", "train_one.py"]


def test_an_environment_is_not_the_project(tmp_path: Path) -> None:
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "pyvenv.cfg").touch()
    (tmp_path / "env" / "train.py").write_text(DDP)
    assert project_look.candidates(tmp_path) == []


def test_data_outside_of_the_project_is_noticed(tmp_path: Path) -> None:
    project = tmp_path / "project"
    (tmp_path / "data").mkdir()
    project.mkdir()
    text = f"{DDP}a = '../data'\nb = '../missing'\nc = 'sub/../x'\nd = '../project/x'\n"
    (project / "train.py").write_text(text)
    (row,) = project_look.candidates(project)
    assert row.outside == ("../data",)
