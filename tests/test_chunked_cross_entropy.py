"""Cross-entropy of a language model in chunks of its tokens: the loss, gradient and Hessian of the plain one."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from landscape.products import chunked_cross_entropy as chunked
from landscape.products.hvp_backends import curvature
from landscape.products.operator import Curvature
from landscape.products.vectors import random_unit
from landscape.subject.losses import cross_entropy
from landscape.subject.subject import Subject
from landscape.subject.weights_cache import cache_of

VOCABULARY, TOKENS, SEQUENCES = 11, 5, 3


class Recurrent(nn.Module):
    """A language model whose last layer gives the logits, with tied weights or a bias of its own."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 4)
        self.mixing = nn.Linear(4, 4)
        self.head = nn.Linear(4, VOCABULARY, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        return self.head(torch.tanh(self.mixing(hidden).cumsum(dim=1)))


def language_model(*, tied: bool) -> Subject:
    torch.manual_seed(0)
    tokens = torch.randint(VOCABULARY, (SEQUENCES, TOKENS + 1))
    model = Recurrent(tied=tied).double().eval()
    return Subject(model, [(tokens[:, :-1], tokens[:, 1:])], weight_decay=0.1)


@pytest.fixture
def few_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tokens at a time."""
    monkeypatch.setattr(chunked, "LOGITS", 2 * VOCABULARY)


def dense(subject: Subject) -> Tensor:
    """The whole Hessian, by products with unit vectors."""
    product = Curvature(subject, subject.parameters, "double-backward").product(0)
    return torch.stack([product(row) for row in torch.eye(subject.size, dtype=torch.float64)])


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_the_dense_hessian_is_that_of_the_plain_loss(monkeypatch: pytest.MonkeyPatch, tied: bool) -> None:
    subject = language_model(tied=tied)
    plain = dense(subject)
    monkeypatch.setattr(chunked, "LOGITS", 2 * VOCABULARY)
    torch.testing.assert_close(dense(subject), plain, rtol=1e-12, atol=1e-13)
    assert plain.abs().max() > 0.1


@pytest.mark.slow
def test_losses_and_derivatives_leave_out_tokens_without_a_target(few_logits: None) -> None:
    torch.manual_seed(0)
    hidden, weight, bias = (torch.randn(*shape, dtype=torch.float64) for shape in ((3, 5, 4), (11, 4), (11,)))
    targets = torch.randint(11, (3, 5))
    targets[1, 2:] = chunked.IGNORED
    inputs = tuple(tensor.requires_grad_() for tensor in (hidden, weight, bias))

    def plain(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return cross_entropy(F.linear(h, w, b), targets)

    def in_chunks(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return chunked.chunked_cross_entropy(h, w, b, targets)

    torch.testing.assert_close(in_chunks(*inputs), plain(*inputs), rtol=1e-13, atol=1e-13)
    assert torch.autograd.gradcheck(in_chunks, inputs)
    assert torch.autograd.gradgradcheck(in_chunks, inputs)


def test_no_tensor_of_all_logits_is_made(few_logits: None) -> None:
    """Every result of an operation of a product has fewer entries than the logits of a sequence."""
    subject, sizes = language_model(tied=True), []

    class Noting(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = function(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and result.shape[-1:] == (VOCABULARY,):
                sizes.append(result.numel())
            return result

    cache_of(subject).values.clear()
    chunked._head(subject)
    with Noting():
        product = Curvature(subject, subject.parameters, "double-backward").product(0)
        product(random_unit(subject.size, 0, device=subject.device, dtype=torch.float64))
    assert sizes
    assert max(sizes) <= 2 * VOCABULARY


def test_the_automatic_backend_of_a_large_vocabulary_is_double_backward(
    few_logits: None, caplog: pytest.LogCaptureFixture
) -> None:
    subject = language_model(tied=True)
    with caplog.at_level("DEBUG", logger="landscape"):
        curved = curvature(subject, subject.parameters, "auto")
    assert curved.hvp == "double-backward"
    assert "cross-entropy over 2 tokens at a time" in caplog.text
    assert math.isclose(curved.product(0).value, subject.loss(0).item(), rel_tol=1e-12)


def test_a_model_that_changes_its_logits_afterwards_is_left_alone(few_logits: None) -> None:
    class Capped(Recurrent):
        def forward(self, tokens: Tensor) -> Tensor:
            return 3.0 * torch.tanh(super().forward(tokens) / 3.0)

    subject = language_model(tied=True)
    torch.manual_seed(0)
    subject.model = Capped(tied=True).double().eval()
    assert chunked.chunked_head(subject, subject.batches[0][1]) is None
