"""Full tuning of the parameters at some paths: the whole model, or the head alone."""

from __future__ import annotations

import fnmatch

import torch
from torch import nn

from headwater.core import Transformer
from headwater.errors import BadSetting
from headwater.i18n import _
from headwater.parts import part
from headwater.quantization.layers import QuantizedModule
from headwater.tuning.base import TuningMethod, file_name
from headwater.tuning.paths import match_paths

HEAD = "head.*"
DECODER = "decoder.*"  # the encoder stays as it is


@part
class Full(TuningMethod):
    """Training of the model's own parameters at these paths: "*" is all of them, "head.*" the head."""

    target: str | tuple[str, ...] = "*"

    def apply(self, model: Transformer, name: str, generator: torch.Generator) -> None:
        quantized = [path for path, module in model.named_modules() if isinstance(module, QuantizedModule)]
        for path in quantized:
            if self.matches(f"{path}.weight"):
                raise BadSetting(
                    _("Full: {path} is quantized and cannot be trained itself; use LoRA, or a base in float", path=path)
                )
        self.check_tied(model)
        for path in self.paths(model):
            parameter = model.get_parameter(path)
            parameter.data = parameter.data.clone()  # one that is mapped from a file is read-only
            parameter.requires_grad_(True)

    def check_tied(self, model: Transformer) -> None:
        """Refuse a target that is nothing but a layer tied to the table of tokens, which would change with it."""
        if any(map(self.matches, dict(model.named_parameters()))):
            return
        for path, home in model.spec.tied:
            if self.matches(f"{path}.weight"):
                raise BadSetting(
                    _(
                        "Full: {path} is tied to {home} and cannot be trained alone; use LoRA, or train {home} too",
                        path=path,
                        home=home,
                    )
                )

    def matches(self, path: str) -> bool:
        """Whether a path is of the target."""
        patterns = (self.target,) if isinstance(self.target, str) else self.target
        return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)

    def paths(self, model: nn.Module) -> list[str]:
        """The paths of the parameters that are trained."""
        names = {file_name(path): path for path, _parameter in model.named_parameters() if ".changes." not in path}
        return [names[name] for name in match_paths(self.target, list(names), _("parameter"))]
