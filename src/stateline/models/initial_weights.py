"""Initial weights of whole models."""

from torch import nn

from stateline.layers import Branch


def initialise(model: nn.Module, d_model: int) -> None:
    r"""Initialise linear maps and embeddings by width and number of residual branches.

    Weights are normal with :math:`\sigma = \sqrt{2 / (5\, d_\mathrm{model})}`, biases are zero, and
    the last maps of residual branches are divided by the root of the number of branches. All other
    parameters keep the values that their layers gave them.

    Args:
        model: Its parameters are changed in place.
        d_model: Width of the residual stream.
    """
    std = (2 / (5 * d_model)) ** 0.5
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    # Differs from official H3, whose code misses the name of H3's output map in this step.
    branches = max(1, sum(isinstance(module, Branch) for module in model.modules()))
    for name, parameter in model.named_parameters():
        if name.endswith("out_proj.weight"):
            nn.init.normal_(parameter, std=std / branches**0.5)
