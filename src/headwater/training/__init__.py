"""Training: from files to a trained model. Start with api, trainer, checkpoint.

api, setup, pretrained                   train() and resume(); from data to a trainer; the initial model
config, recipes                          the settings behind flags, YAML and headwater.train(...); defaults and presets
task_data                                files -> examples -> the datasets of a task (headwater.tasks)
trainer, state                           the training loop, early stopping; its state, events and callbacks
optim, gradients                         optimizers, EMA, gradient clipping
schedules                                learning rate schedules, when to evaluate, steps under a time limit
evaluate                                 evaluation during and after training
predict                                  Predictor: the trained model on new texts
checkpoint, storage                      snapshots of a trainer; crash-safe checkpoints on disk
run_dir, run_output, loggers, plots      the run directory and what is written there; logs, the progress bar
diagnostics, nonfinite                   NaN sources, divergence, out-of-memory errors, stragglers
distributed, launch                      several processes: process group, DDP and FSDP2; --nproc, signals
"""

from headwater.training.config import TrainConfig

__all__ = ["TrainConfig"]
