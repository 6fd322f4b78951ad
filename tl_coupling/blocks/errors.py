"""The errors of a block function that cannot be measured."""


class StepError(ValueError):
    """A block, called again, is not the function that was traced.

    Its weights or hooks changed, or it draws at random.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.PReLU(init=0.9))
        >>> changed = tlc.trace_modules(net, lambda: net(-torch.ones(1, 3, 4)))
        >>> _ = torch.nn.init.zeros_(net[0].weight)
        >>> try:
        ...     J = tlc.block_jacobian(changed, 0)
        ... except tlc.gradients.StepError:
        ...     print("trace it again")
        trace it again
    """


class DerivativeError(ValueError):
    """A block function has no derivative, or automatic differentiation gives another.

    Example:
        >>> class Rounds(torch.nn.Module):
        ...     def forward(self, x):
        ...         return x + (8 * x).round() / 8
        >>> net = torch.nn.Sequential(Rounds())
        >>> rounded = tlc.trace_modules(net, lambda: net(torch.rand(1, 3, 4)))
        >>> try:
        ...     J = tlc.block_jacobian(rounded, 0)
        ... except tlc.gradients.DerivativeError:
        ...     print("a step function has no Jacobian")
        a step function has no Jacobian
    """
