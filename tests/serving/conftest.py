"""A server with tiny models of all three architectures, called without a network."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from headwater.serving.app import create_app
from headwater.serving.model_store import ModelStore, StoredModel, build_tiny_model
from headwater.serving.security import AccessPolicy
from headwater.weights.native import save_native

sys.path.insert(0, str(Path(__file__).parent))  # asyncio_runner.py is a plain module beside the tests
HOST = "127.0.0.1:8017"
ARCHITECTURES = {"encoder-decoder": "tiny encoder-decoder", "encoder": "tiny encoder", "decoder": "tiny decoder"}


def write_run(folder: Path) -> Path:
    """A small folder of a run, as training writes it: a seq2seq model, metrics, samples, two checkpoints."""
    import json

    from headwater.training.checkpoint import CheckpointManager
    from headwater.weights.native import named_tensors
    from headwater.weights.safetensors import serialize_safetensors

    tiny = build_tiny_model(ARCHITECTURES["encoder-decoder"])
    save_native(folder / "model", tiny.model, {"task": "seq2seq"})
    tiny.tokenizer.save(folder / "model")
    (folder / "config.yaml").write_text("task: seq2seq\n")
    train = [
        {"step": n, "split": "train", "loss": 5.0 / n, "lr": 1e-3, "grad_norm": 1.0, "time": 1.0} for n in range(1, 41)
    ]
    valid = [
        {"step": n, "split": "valid", "loss": 4.0 / n, "exact": n / 40, "best": True, "time": 1.0} for n in (20, 40)
    ]
    lines = [*train, *valid, {"step": 40, "stop_reason": "finished", "seconds": 1.0, "time": 1.0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    samples = [{"step": n, "input": "the cat", "output": f"output at {n}"} for n in (20, 40)]
    (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in samples))
    (folder / "checkpoints").mkdir()
    store = CheckpointManager(folder / "checkpoints", "run")
    for step in (20, 40):
        tensors = {name: value * (1 + step / 100) for name, value in named_tensors(tiny.model).items()}
        store.save(
            step,
            {
                "model.safetensors": lambda t=tensors: serialize_safetensors("model.safetensors", t),
                "state.json": lambda: [b"{}"],
            },
        )
    return folder


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "dates")


@pytest.fixture(scope="session")
def model_store(run_folder) -> ModelStore:
    return ModelStore([StoredModel("dates", "run", run_folder)])


@pytest.fixture(scope="session")
def application(model_store):
    return create_app(model_store, AccessPolicy("127.0.0.1", 8017))


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
