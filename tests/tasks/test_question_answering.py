"""Questions that may have no answer in their text: predicted, measured and answered as in SQuAD 2.0."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

from headwater import cli
from headwater.data.collate import QAWindow, SpecialTokens, qa_windows
from headwater.data.examples import QAExample
from headwater.tasks import get_task
from headwater.tasks.question_answering import MAX_ANSWER_TOKENS, NO_ANSWER, QA_STRIDE, QA_WINDOW, SpanPrediction
from headwater.text.train import train_tokenizer
from headwater.training import predict
from headwater.training.config import parse_config
from headwater.training.evaluate import Evaluator
from headwater.training.predict import Predictor
from headwater.training.task_data import build_task_data

PLACES = ["Paris", "Rome", "Oslo", "Lima"]
CONTEXT = "Ada lives in Paris and works in Rome."
KNOWN = QAExample("Where does Ada live?", CONTEXT, ("Paris",), (13,))
UNKNOWN = QAExample("What car does Ada drive?", CONTEXT)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([CONTEXT, KNOWN.question, UNKNOWN.question, *PLACES] * 20, "bpe", 400)


class Oracle(nn.Module):
    """Logits that point at a span of a window where its text has the word, and at position 0 with a given strength."""

    def __init__(self, tokenizer, word="Paris", null=0.0, pointing=5.0):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.tokenizer, self.word, self.null, self.pointing = tokenizer, word, null, pointing

    def forward(self, ids, attention_mask=None, token_types=None, document_ids=None):
        logits = torch.zeros(*ids.shape, 2)
        logits[:, 0] = self.null / 2
        for row, line in zip(logits, ids.tolist(), strict=True):
            pieces = [self.tokenizer.decode([token]).strip() for token in line]
            if self.word in pieces:
                row[pieces.index(self.word)] = self.pointing / 2
        return logits


@pytest.fixture(autouse=True)
def no_loss(monkeypatch):
    """The oracle has logits only; the loss is not what these tests measure."""
    monkeypatch.setattr(Evaluator, "loss", lambda evaluator, model: 0.0)


def question_data(tokenizer, train, valid=None):
    return build_task_data(
        parse_config({"batch_tokens": 4000}),
        get_task("question-answering"),
        list(train),
        list(valid or train),
        tokenizer,
    )


@pytest.mark.parametrize(("null", "said"), [(4.9, "Paris"), (5.0, "Paris"), (5.1, "")])
def test_the_null_score_is_compared_with_the_best_span(tokenizer, null, said):
    """A draw is an answer; in use and in evaluation alike."""
    model = Oracle(tokenizer, null=null)
    trained = Predictor("", model, tokenizer, {"task": "question-answering", "null_threshold": 0.0})
    assert trained([KNOWN]) == [said]
    scores = Evaluator(question_data(tokenizer, [KNOWN, UNKNOWN]))(model).metrics
    right = 100.0 if said else 0.0
    assert (scores["HasAns_exact"], scores["NoAns_exact"]) == (right, 100.0 - right)
    assert scores["exact"] == 50.0


def test_the_threshold_is_tunable_and_belongs_to_the_run(tokenizer):
    model = Oracle(tokenizer, null=6.0)
    tuned = Predictor("", model, tokenizer, {"task": "question-answering", "null_threshold": 2.0})
    assert tuned([KNOWN]) == ["Paris"]
    plain = Predictor("", model, tokenizer, {"task": "question-answering"})
    assert plain([KNOWN]) == [""]
    assert plain([KNOWN], null_threshold=1.5) == ["Paris"]


def test_a_model_taught_only_with_answers_always_answers(tokenizer):
    """As in SQuAD 1.1: position 0 then means only that the answer is in another window."""
    assert question_data(tokenizer, [KNOWN]).metadata["null_threshold"] is None
    assert question_data(tokenizer, [KNOWN, UNKNOWN]).metadata["null_threshold"] == 0.0
    scores = Evaluator(question_data(tokenizer, [KNOWN]))(Oracle(tokenizer, null=9.0)).metrics
    assert scores["exact"] == 100.0 and not any("Ans" in name for name in scores)


def test_the_null_score_of_a_long_text_is_the_minimum_over_its_windows(tokenizer):
    """One window has the answer; the many without it must not outvote it."""
    long = " ".join(["Rome works in Lima."] * 300) + " " + CONTEXT
    question = QAExample(KNOWN.question, long)
    assert len(qa_windows(question, tokenizer, SpecialTokens.from_tokenizer(tokenizer), QA_WINDOW, QA_STRIDE)) > 3

    class Local(Oracle):
        def forward(self, ids, attention_mask=None, token_types=None, document_ids=None):
            logits = super().forward(ids)
            found = (logits[:, 1:] > 0).any(dim=2).any(dim=1)
            logits[~found, 0] = 50.0  # surely not here
            return logits

    trained = Predictor(
        "", Local(tokenizer, null=1.0), tokenizer, {"task": "question-answering", "null_threshold": 0.0}
    )
    assert trained([question]) == ["Paris"]
    assert trained([QAExample(KNOWN.question, long.replace("Paris", "Oslo"))]) == [""]


def test_a_prediction_is_the_best_of_all_spans_of_all_windows():
    draw = torch.Generator().manual_seed(0)
    text = "abcdefghij" * 10
    views = [QAWindow((0,) * 60, (0,) * 60, (0, 0), tuple((n, n + 1) for n in range(first, first + 50)), 7)
             for first in (0, 25, 50)]  # fmt: skip
    for _ in range(5):
        logits = [torch.randn(60, 2, generator=draw) for _ in views]
        prediction = SpanPrediction()
        for view, one in zip(views, logits, strict=True):
            prediction.add(text, view, *one.unbind(-1))
        spans = [float(one[a, 0] + one[b, 1]) for one in logits
                 for a in range(7, 57) for b in range(a, min(a + MAX_ANSWER_TOKENS, 57))]  # fmt: skip
        assert prediction.score == pytest.approx(max(spans))
        assert prediction.null_score == pytest.approx(min(float(one[0].sum()) for one in logits))
        gap = prediction.null_score - prediction.score
        assert prediction.answer(gap + 1e-6) == prediction.answer(None) == prediction.text
        assert prediction.answer(gap - 1e-6) == ""


def test_a_window_without_text_has_no_span():
    prediction = SpanPrediction()
    prediction.add("", QAWindow((0, 1, 2), (0, 0, 1), (0, 0), (), 2), torch.zeros(3), torch.zeros(3))
    assert (prediction.answer(0.0), prediction.answer(None), prediction.score) == ("", "", -math.inf)


def test_samples_show_that_there_is_no_answer(tokenizer):
    found = Evaluator(question_data(tokenizer, [KNOWN, UNKNOWN]))(Oracle(tokenizer, null=9.0))
    assert [(s["output"], s["expected"]) for s in found.samples] == [(NO_ANSWER, "Paris"), (NO_ANSWER, NO_ANSWER)]


@pytest.mark.parametrize(("language", "words"), [("en", "(no answer)"), ("zh", "（无答案）")])
def test_the_command_says_no_answer_and_json_stays_empty(tokenizer, tmp_path, monkeypatch, capsys, language, words):
    trained = Predictor(
        "", Oracle(tokenizer, null=9.0), tokenizer, {"task": "question-answering", "null_threshold": 0.0}
    )
    monkeypatch.setattr(predict, "load_run", lambda folder: trained)
    (tmp_path / "a.txt").write_text(CONTEXT)
    command = ["answer", "run", KNOWN.question, "--text", str(tmp_path / "a.txt"), "--lang", language]
    assert cli.main(command) == 0
    assert capsys.readouterr().out == words + "\n"
    assert cli.main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["output"] == ""
