"""A server on tiny models of all three shapes, asked without a network."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from headwater.serving.app import app
from headwater.serving.gate import Guard
from headwater.serving.shelf import Item, Shelf
from headwater.serving.tiny import made
from headwater.weights.native import save_model

sys.path.insert(0, str(Path(__file__).parent))  # scenes.py is a plain module beside the tests
HOST = "127.0.0.1:8017"
SHAPES = {"both": "tiny encoder-decoder", "encoder": "tiny encoder", "decoder": "tiny decoder"}


def write_run(folder: Path) -> Path:
    """A small folder of a run, as training writes it: a text-to-text model, metrics, samples, two checkpoints."""
    import json

    from headwater.training.checkpoints import Checkpoints
    from headwater.weights.native import tensors_of
    from headwater.weights.tensors import pieces

    tiny = made(SHAPES["both"])
    save_model(folder / "model", tiny.model, {"task": "text-to-text"})
    tiny.tokenizer.save(folder / "model")
    (folder / "config.yaml").write_text("task: text-to-text\n")
    train = [
        {"step": n, "split": "train", "loss": 5.0 / n, "lr": 1e-3, "grad_norm": 1.0, "time": 1.0} for n in range(1, 41)
    ]
    valid = [
        {"step": n, "split": "valid", "loss": 4.0 / n, "exact": n / 40, "best": True, "time": 1.0} for n in (20, 40)
    ]
    lines = [*train, *valid, {"step": 40, "stopped": "finished", "seconds": 1.0, "time": 1.0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    samples = [{"step": n, "input": "the cat", "output": f"said at {n}"} for n in (20, 40)]
    (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in samples))
    (folder / "checkpoints").mkdir()
    store = Checkpoints(folder / "checkpoints", "run")
    for step in (20, 40):
        tensors = {name: value * (1 + step / 100) for name, value in tensors_of(tiny.model).items()}
        store.save(
            step, {"model.safetensors": lambda t=tensors: pieces("model.safetensors", t), "state.json": lambda: [b"{}"]}
        )
    return folder


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "dates")


@pytest.fixture(scope="session")
def shelf(run_folder) -> Shelf:
    return Shelf([Item("dates", "run", run_folder)])


@pytest.fixture(scope="session")
def application(shelf):
    return app(shelf, Guard("127.0.0.1", 8017))


@pytest.fixture(scope="session")
def client(application) -> TestClient:
    return TestClient(application, base_url=f"http://{HOST}", raise_server_exceptions=False)


@pytest.fixture(scope="session")
def ask(client):
    def post(name: str, **body):
        answer = client.post(f"/api/{name}", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json() if "json" in answer.headers["content-type"] else answer.content

    return post
