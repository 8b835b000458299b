"""Settings of learning from preferences and rewards: DPO and its variants, reward models, PPO and GRPO."""

from __future__ import annotations

from typing import TypedDict

from headwater.i18n import _
from headwater.training.setting_types import Bool, ConfigSection, Float, Int, Text, setting


class FeedbackConfig(ConfigSection):
    preference_loss: Text = setting("sigmoid", _("of pairs: sigmoid (DPO), ipo, hinge, robust, simpo or orpo"))
    beta: Float = setting(
        -1.0, _("how strongly the model is held to what it was, or to its pairs (-1: of the task)"), ge=-1
    )
    simpo_margin: Float = setting(0.5, _("SimPO: how much likelier the better answer shall be"))
    rpo_alpha: Float = setting(0.0, _("of pairs: weight of the loss of the better answer itself (RPO); 1 is usual"))
    reward: Text = setting("", _("of answers: file.py:function, a reward model, or CLASSIFIER:LABEL"))
    reward_errors: Text = setting("stop", _("a reward function that fails: stop, or skip the answer"))
    rollouts: Int = setting(64, _("answers that are sampled before they are learned from"), ge=2)
    minibatch: Int = setting(16, _("answers of one step"), ge=1)
    answer_tokens: Int = setting(48, _("maximum tokens of an answer that is sampled"), ge=1)
    temperature: Float = setting(1.0, _("of sampling, and of all probabilities that are compared"), ge=0.01)
    ppo_epochs: Int = setting(4, _("how often the same answers are learned from"), ge=1)
    group_size: Int = setting(8, _("GRPO: answers to one prompt"), ge=2)
    clip_range: Float = setting(0.2, _("how far the ratio of probabilities may move from 1"), lt=1)
    clip_range_high: Float = setting(0.0, _("the same upwards (0: as clip_range)"))
    value_clip: Float = setting(0.2, _("PPO: how far a value may move"))
    value_weight: Float = setting(0.1, _("PPO: weight of the loss of the values"))
    gae_lambda: Float = setting(0.95, _("PPO: decay of generalized advantage estimation"), le=1)
    discount: Float = setting(1.0, _("PPO: discount of later rewards"), le=1)
    kl_target: Float = setting(0.0, _("KL divergence of an answer that an adaptive beta aims at (0: beta is fixed)"))
    kl_horizon: Float = setting(10000.0, _("answers in which an adaptive beta reacts"))
    whiten_rewards: Bool = setting(False, _("PPO: rewards of tokens are scaled to variance 1, their mean stays"))
    normalize_rewards: Bool = setting(False, _("rewards are scaled by those of the first answers: mean 0, variance 1"))
    missing_end_penalty: Float = setting(1.0, _("subtracted from the reward of an answer that does not end"))
    grpo_loss: Text = setting("dapo", _("mean of the loss: grpo (of answers), dapo or bnpo (of tokens), dr_grpo"))
    group_scale: Text = setting("group", _("GRPO: advantages over the deviation of a group, of the batch, or none"))
    importance: Text = setting("token", _("GRPO: a ratio for each token, or for the whole answer: sequence (GSPO)"))
    center_rewards: Float = setting(0.0, _("reward model: weight of the squared sum of both rewards (0: none)"))


class FeedbackKwargs(TypedDict, total=False):
    """The settings of preferences and rewards, as keyword arguments."""

    preference_loss: str
    beta: float
    simpo_margin: float
    rpo_alpha: float
    reward: str
    reward_errors: str
    rollouts: int
    minibatch: int
    answer_tokens: int
    temperature: float
    ppo_epochs: int
    group_size: int
    clip_range: float
    clip_range_high: float
    value_clip: float
    value_weight: float
    gae_lambda: float
    discount: float
    kl_target: float
    kl_horizon: float
    whiten_rewards: bool
    normalize_rewards: bool
    missing_end_penalty: float
    grpo_loss: str
    group_scale: str
    importance: str
    center_rewards: float
