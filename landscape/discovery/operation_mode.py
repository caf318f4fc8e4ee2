"""A mode that sees every operation below autograd."""

from torch.utils._python_dispatch import TorchDispatchMode


class OperationMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the operations of a block of code, which is never compiled; subclasses define `__torch_dispatch__`."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Say no, else torch imports its compiler, which takes seconds, to keep it from what is never compiled."""
        return False
