"""The learning rate at any point of training: warm-up, then steps down.

Always true: it depends on how many epochs are done alone, so a resumed run needs no state for it.
"""

from __future__ import annotations

from job import Options


def learning_rate(options: Options, epochs: float) -> float:
    """The rate of the step that completes ``epochs`` epochs (1.5: the middle of the second).

    It grows linearly over ``num_warmup_epochs`` and is divided by ``lr_scheduler_divisor`` every
    ``lr_scheduler_divide_every_n_epochs``, as in the schedule that torch_xla's script uses.
    """
    if options.lr_scheduler_type == "constant":
        return options.lr
    if epochs < options.num_warmup_epochs:
        return options.lr * epochs / options.num_warmup_epochs
    drops = int(epochs) // options.lr_scheduler_divide_every_n_epochs
    return options.lr / options.lr_scheduler_divisor**drops
