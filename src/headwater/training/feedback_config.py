"""Settings of learning from preferences and rewards: DPO and its variants, reward models."""

from __future__ import annotations

from typing import TypedDict

from headwater.i18n import _
from headwater.training.setting_types import ConfigSection, Float, Text, setting


class FeedbackConfig(ConfigSection):
    preference_loss: Text = setting("sigmoid", _("of pairs: sigmoid (DPO), ipo, hinge, robust, simpo or orpo"))
    beta: Float = setting(
        -1.0, _("how strongly the model is held to what it was, or to its pairs (-1: of the task)"), ge=-1
    )
    simpo_margin: Float = setting(0.5, _("SimPO: how much likelier the better answer shall be"))
    center_rewards: Float = setting(0.0, _("reward model: weight of the squared sum of both rewards (0: none)"))


class FeedbackKwargs(TypedDict, total=False):
    """The settings of preferences and rewards, as keyword arguments."""

    preference_loss: str
    beta: float
    simpo_margin: float
    center_rewards: float
