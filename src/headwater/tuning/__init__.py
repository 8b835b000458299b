"""Tuning: adapters and other changes of a built model by path pattern; only what they add is trained.

headwater.tune(model, LoRA(r=8, target="*.self_attn.*"))
"""

from headwater.tuning.api import (
    adapter_tensors,
    base_fingerprint,
    copy_adapter,
    remove_adapter,
    set_adapter_tensors,
    tune,
    use_adapter,
)
from headwater.tuning.base import Selection, Tuning, TuningMethod, tuning_of
from headwater.tuning.bottleneck import Houlsby, Parallel, Pfeiffer
from headwater.tuning.full import Full
from headwater.tuning.lowrank import DoRA, LoRA, RsLoRA
from headwater.tuning.merge import Merged, can_merge, merge
from headwater.tuning.prefix import PrefixTuning
from headwater.tuning.prompt import PromptTuning, PTuning
from headwater.tuning.scaling import IA3

__all__ = [
    "IA3",
    "DoRA",
    "Full",
    "Houlsby",
    "LoRA",
    "Merged",
    "PTuning",
    "Parallel",
    "Pfeiffer",
    "PrefixTuning",
    "PromptTuning",
    "RsLoRA",
    "Selection",
    "Tuning",
    "TuningMethod",
    "adapter_tensors",
    "base_fingerprint",
    "can_merge",
    "copy_adapter",
    "merge",
    "remove_adapter",
    "set_adapter_tensors",
    "tune",
    "tuning_of",
    "use_adapter",
]
