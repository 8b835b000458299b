"""What TRL computes of given numbers, in a Python that has it: trl_oracle.py PART given.npz found.npz.

Parts: preference, reward, grpo and model need trl 1.12; ppo the last TRL whose PPO took a reward function, 0.11.4.
A trainer's own methods are called on a stand-in for the trainer, which holds their settings alone.
"""

from __future__ import annotations

import inspect
import sys
from collections import defaultdict
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch

PAIR_LOSSES = {"sigmoid": "sigmoid", "hinge": "hinge", "ipo": "ipo", "robust": "robust"}


class OneProcess:
    """An accelerator: whatever is gathered or reduced stays as it is."""

    device = torch.device("cpu")
    num_processes = 1

    def __getattr__(self, name):
        return lambda tensor, *options, **settings: tensor


def stand_in(**settings):
    """Settings of a trainer, and what it logs to."""
    return SimpleNamespace(
        model=torch.nn.Linear(1, 1).eval(), accelerator=OneProcess(), _metrics=defaultdict(lambda: defaultdict(list)),
        args=SimpleNamespace(**settings.pop("args", {})), _total_train_tokens=0, **settings,
    )  # fmt: skip


def dpo_trainer(loss, beta, smoothing):
    return stand_in(
        aux_loss_enabled=False, ld_alpha=None, precompute_ref_logps=True, f_divergence_type="reverse_kl", beta=beta,
        loss_types=[loss], loss_weights=[1.0], label_smoothing=smoothing, use_weighting=False,
    )  # fmt: skip


def dpo_loss(model, given, loss, beta, smoothing=0.0):
    from trl import DPOTrainer

    inputs = {name: given[name] for name in ("input_ids", "attention_mask", "completion_mask")}
    inputs |= {name: given[name] for name in ("ref_chosen_logps", "ref_rejected_logps")}
    return DPOTrainer._compute_loss(dpo_trainer(loss, beta, smoothing), model, inputs, False)


def preference(given):
    """The mean loss of pairs from logits [2B, T, V]: DPO's variants; cDPO and SimPO from CPO, ORPO."""
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    def model(**inputs):
        return SimpleNamespace(logits=given["logits"])

    beta, smoothing = 0.3, 0.1
    found = {name: dpo_loss(model, given, theirs, beta, smoothing) for name, theirs in PAIR_LOSSES.items()}
    sums, means = (_logps(given, average) for average in (False, True))
    cpo = stand_in(alpha=0.0, loss_type="sigmoid", beta=beta, label_smoothing=smoothing, simpo_gamma=0.5)
    ratios = sums[0] - given["ref_chosen_logps"], sums[1] - given["ref_rejected_logps"]
    found["cdpo"] = CPOTrainer.cpo_loss(cpo, *ratios)[0].mean()
    cpo.loss_type, cpo.label_smoothing, cpo.beta = "simpo", 0.0, 2.0
    found["simpo"] = CPOTrainer.cpo_loss(cpo, *means)[0].mean()
    odds = ORPOTrainer.odds_ratio_loss(cpo.__class__(beta=beta, accelerator=cpo.accelerator), *means)[0]
    found["orpo_odds"] = -odds.mean()
    return found


def _logps(given, average):
    """The log-probabilities of chosen and rejected answers, as TRL sums or averages them."""
    from trl.experimental.cpo import CPOTrainer

    labels = given["input_ids"].masked_fill(given["completion_mask"] == 0, -100)
    return CPOTrainer.get_batch_logps(given["logits"], labels, average_log_prob=average).chunk(2)


def reward(given):
    from trl import RewardTrainer

    found = {}
    for name, center, margin in (("plain", None, {}), ("margin", 0.01, {"margin": given["margin"]})):
        trainer = stand_in(args={"center_rewards_coefficient": center})
        inputs = {"attention_mask": torch.ones(1), **margin}
        found[name] = RewardTrainer.compute_loss(
            trainer, lambda **inputs: SimpleNamespace(logits=given["rewards"]), inputs
        )
    return found


def grpo(given):
    """The loss of answers from logits, by each mean and each kind of ratio; advantages by groups."""
    from trl import GRPOTrainer
    from trl.trainer.utils import nanstd

    found = {}
    for mean in ("grpo", "bnpo", "dr_grpo", "dapo"):
        for importance in ("token", "sequence"):
            trainer = stand_in(
                args={"use_bias_correction_kl": False, "delta": None}, aux_loss_enabled=False, top_entropy_quantile=1.0,
                off_policy_mask_threshold=None, importance_sampling_level=importance, beta=0.04, loss_type=mean,
                epsilon_low=0.2, epsilon_high=0.28, use_vllm=False, max_completion_length=12, temperature=0.7,
                model_kwarg_keys=set(), _entropy_bonus_enabled=False,
            )  # fmt: skip
            logprobs = inspect.unwrap(GRPOTrainer._get_per_token_logps_and_entropies)  # without the profiler
            trainer._get_per_token_logps_and_entropies = partial(logprobs, trainer)
            inputs = {name: given[name] for name in given if name not in ("logits", "scores")}
            inputs["num_items_in_batch"] = given["completion_mask"].sum()
            model = lambda **inputs: SimpleNamespace(logits=given["logits"])  # noqa: E731
            found[f"{mean}_{importance}"] = GRPOTrainer._compute_loss(trainer, model, inputs)
    groups = given["scores"].view(-1, 4)
    centered = groups - torch.nanmean(groups, 1, keepdim=True)
    found["advantages"] = (centered / (nanstd(groups, dim=1, keepdim=True) + 1e-4)).nan_to_num().flatten()
    return found


def ppo(given):
    """Rewards, advantages, returns and both losses, as the classic trainer computes them one after the other."""
    from trl.trainer.ppo_trainer import PPOTrainer
    from trl.trainer.utils import AdaptiveKLController

    settings = SimpleNamespace(
        kl_penalty="kl", whiten_rewards=False, gamma=0.99, lam=0.95, cliprange=0.2, cliprange_value=0.2, vf_coef=0.1,
        ratio_threshold=10.0,
    )  # fmt: skip
    found = {}
    for whiten in (False, True):
        settings.whiten_rewards = whiten
        trainer = SimpleNamespace(config=settings, kl_ctl=SimpleNamespace(value=0.2))
        trainer._kl_penalty = partial(PPOTrainer._kl_penalty, trainer)
        mask = given["mask"]
        rewards, _, kls = PPOTrainer.compute_rewards(
            trainer, given["scores"], given["old"], given["reference"], mask.long()
        )
        values, advantages, returns = PPOTrainer.compute_advantages(trainer, given["values"], rewards, mask)
        logits = torch.zeros(*mask.shape, 2, dtype=mask.dtype)
        policy, value, _ = PPOTrainer.loss(
            trainer, given["old"], values, logits, given["new_values"], given["new"], mask, advantages, returns
        )
        name = "white_" if whiten else ""
        found |= {f"{name}advantages": advantages * mask, f"{name}returns": returns * mask}
        found |= {f"{name}policy": policy, f"{name}value": value, "kl": (kls * mask).sum(1).mean()}
    controller = AdaptiveKLController(0.2, 6.0, 10_000)
    betas = []
    for kl in (3.0, 6.6, 40.0):
        controller.update(kl, 512)
        betas.append(controller.value)
    return found | {"betas": torch.tensor(betas, dtype=torch.float64)}


def model(given):
    """DPO of a whole model: its loss, and the gradient of its output matrix."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(sys.argv[4])
    loss = dpo_loss(theirs, given, "sigmoid", 0.1)
    loss.backward()
    return {"loss": loss, "gradient": theirs.lm_head.weight.grad}


if __name__ == "__main__":
    part, source, target = sys.argv[1:4]
    arrays = {name: torch.from_numpy(array) for name, array in np.load(source).items()}
    results = {"preference": preference, "reward": reward, "grpo": grpo, "ppo": ppo, "model": model}[part](arrays)
    np.savez(target, **{name: value.detach().numpy() for name, value in results.items()})
