"""Causal language models on a token file: two tiny ones of transformers, from their configurations."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from analytic import run_probe
from foreign import torchvision_models
from torch.nn.attention import SDPBackend, sdpa_kernel

import landscape
from landscape.data import load as load_data
from landscape.data.structure import outputs_of
from landscape.discovery.discover import discover
from landscape.layers.selection import remarks
from landscape.models import providers
from landscape.models.providers import ModelRequest
from landscape.options import OptionError
from landscape.predictions.evaluation import metrics_of
from landscape.probes.hessian import Hessian
from landscape.subject.loading import load as loading
from landscape.subject.loading.identity import attributes, protocol
from landscape.subject.spec import Spec
from landscape.subject.subject import Subject

VOCABULARY, CONTEXT = 11, 6
KINDS: dict[str, dict[str, Any]] = {
    "GPT2": {"vocab_size": VOCABULARY, "n_positions": CONTEXT, "n_embd": 4, "n_layer": 1, "n_head": 2},
    "Llama": {
        "vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT, "hidden_size": 4, "intermediate_size": 6,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    },
}  # fmt: skip


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a configuration and no weights."""
    torchvision_models()
    transformers = pytest.importorskip("transformers")
    path: Path = tmp_path_factory.mktemp(request.param)
    config = getattr(transformers, f"{request.param}Config")(**KINDS[request.param], bos_token_id=0, eos_token_id=0)
    config.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokens") / "tokens.npy"
    np.save(path, np.random.default_rng(0).integers(0, VOCABULARY, 8 * CONTEXT + 4).astype(np.uint16))
    return path


def _loaded(folder: Path, tokens: Path, **options: Any) -> Subject:
    return landscape.load(None, model=f"hf:{folder}", data=str(tokens), device="cpu", **options)


def test_a_run_of_tokens_is_cut_into_blocks_and_every_next_token_is_a_target(tokens: Path) -> None:
    run = np.load(tokens).astype(np.int64)
    images = load_data(str(tokens), block_size=CONTEXT)
    assert len(images) == 8
    pairs = zip(images.inputs.tolist(), images.targets.tolist(), strict=True)
    found = {tuple(row): tuple(target) for row, target in pairs}
    for start in range(0, 8 * CONTEXT, CONTEXT):
        block, following = (tuple(run[at : at + CONTEXT].tolist()) for at in (start, start + 1))
        assert found[block] == following
    first = load_data(str(tokens), block_size=CONTEXT, samples=3)
    assert torch.equal(first.inputs, images.inputs[:3])


def test_rows_are_sequences_of_their_own(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).integers(0, 9, (5, 7))
    np.save(tmp_path / "rows.npy", rows)
    whole, short = load_data(str(tmp_path / "rows.npy")), load_data(str(tmp_path / "rows.npy"), block_size=3)
    order = [int(np.flatnonzero((rows[:, :-1] == row.numpy()).all(axis=1))[0]) for row in whole.inputs]
    assert sorted(order) == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(whole.targets, rows[order, 1:])
    np.testing.assert_array_equal(short.inputs, rows[order, :3])
    np.testing.assert_array_equal(short.targets, rows[order, 1:4])


@pytest.mark.parametrize(
    ("array", "size", "kind", "message"),
    [
        (np.arange(20), None, OptionError, "one sequence of 20 tokens; .* --block-size N"),
        (np.arange(4), 4, OptionError, "too few for a block of 4"),
        (np.zeros((3, 1), int), None, OptionError, "too few"),
        (np.arange(20), 0, OptionError, "--block-size must be at least 1, got 0"),
        (np.array([1, -100, 3]), 2, ValueError, "has the token -100"),
        (np.zeros(9), 2, ValueError, "holds float64 of shape"),
        (np.zeros((2, 3, 4), int), 2, ValueError, r"expected token numbers, one sequence \(1-D\) or several \(2-D\)"),
        (np.array([{}]), 2, ValueError, "cannot be read"),
    ],
)
def test_a_file_of_something_else_is_refused(
    array: np.ndarray, size: int | None, kind: type[Exception], message: str, tmp_path: Path
) -> None:
    np.save(tmp_path / "file.npy", array)
    with pytest.raises(kind, match=message):
        load_data(str(tmp_path / "file.npy"), block_size=size)


@pytest.mark.slow
def test_blocks_are_as_long_as_the_context_unless_asked_otherwise(folder: Path, tokens: Path) -> None:
    subject = _loaded(folder, tokens)
    assert subject.batch(0)[0].shape == (8, CONTEXT)
    assert json.loads(str(attributes(subject)["spec"]))["block_size"] == CONTEXT
    assert "8 sequences of 6 tokens" in protocol(subject)
    assert _loaded(folder, tokens, block_size=3).batch(0)[0].shape == (17, 3)


def test_the_loss_is_the_models_own(folder: Path, tokens: Path) -> None:
    subject = _loaded(folder, tokens)
    inputs, _ = subject.batch(0)
    run = torch.tensor(np.load(tokens).astype(np.int64))
    whole = [torch.cat([row, run[[_after(run, row)]]]) for row in inputs]
    with torch.inference_mode():
        logits = subject.model(torch.stack(whole)[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.stack(whole)[:, 1:].flatten())
    assert subject.objective(0).item() == pytest.approx(expected.item(), rel=1e-6)


def _after(run: torch.Tensor, row: torch.Tensor) -> int:
    """Position of the token behind a row."""
    return next(at + len(row) for at in range(len(run) - len(row)) if torch.equal(run[at : at + len(row)], row))


def test_evaluate_gives_perplexity_with_errors_over_sequences(folder: Path, tokens: Path) -> None:
    subject = _loaded(folder, tokens)
    found = metrics_of(subject)
    inputs, targets = subject.batch(0)
    with torch.inference_mode():
        chances = subject.model(inputs).logits.double().log_softmax(dim=-1)
    losses = -chances.gather(2, targets[..., None])[..., 0].mean(dim=1)
    assert found["loss"] == pytest.approx(losses.mean().item(), rel=1e-6)
    assert found["loss_se"] == pytest.approx(losses.std().item() / math.sqrt(8), rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(losses.mean()), rel=1e-6)
    assert found["perplexity_se"] == pytest.approx(found["perplexity"] * found["loss_se"])
    assert found["accuracy"] == pytest.approx((chances.argmax(2) == targets).double().mean().item())


@pytest.mark.slow
def test_the_hessian_is_that_of_its_dense_matrix_and_tied_weights_count_once(folder: Path, tokens: Path) -> None:
    subject = _loaded(folder, tokens, samples=4)
    subject.model.double()
    tied = subject.model.get_input_embeddings().weight is subject.model.get_output_embeddings().weight  # type: ignore[operator]
    assert tied == (folder.name.startswith("GPT2"))
    assert subject.size == sum(p.numel() for p in {id(p): p for p in subject.model.parameters()}.values())
    parameters, (inputs, targets) = subject.parameters, subject.batch(0)
    names, sizes = list(parameters), [p.numel() for p in parameters.values()]

    def objective(flat: torch.Tensor) -> torch.Tensor:
        parts = [v.view_as(parameters[n]) for n, v in zip(names, flat.split(sizes), strict=True)]
        outputs = torch.func.functional_call(subject.model, dict(zip(names, parts, strict=True)), (inputs,)).logits
        return torch.nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    start = torch.cat([p.detach().flatten() for p in parameters.values()])
    with sdpa_kernel(SDPBackend.MATH):
        dense = torch.linalg.eigvalsh(_dense(objective, start))
    expected = dense[dense.abs().argsort(descending=True)[:3]]
    found = run_probe(Hessian(top=3, tol=1e-7, max_products=400), subject)
    np.testing.assert_allclose(found["eigenvalue"][0], expected, rtol=1e-6)


def _dense(function: Callable[[torch.Tensor], torch.Tensor], at: torch.Tensor) -> torch.Tensor:
    point = at.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(function(point), point, create_graph=True)
    rows = torch.eye(len(at), dtype=at.dtype)
    return torch.stack([torch.autograd.grad(gradient, point, row, retain_graph=True)[0] for row in rows])


@pytest.mark.slow
def test_probes_of_the_loss_run_on_it(folder: Path, tokens: Path, tmp_path: Path) -> None:
    subject, out = _loaded(folder, tokens), tmp_path / "r.h5"
    loss = subject.loss(0).item()
    surface = landscape.measure("surface", subject, out=out, resolution=3)
    assert surface["loss"].sel(x=0, y=0).item() == pytest.approx(loss, rel=1e-6)
    assert np.isfinite(surface["accuracy"]).all()
    line = landscape.measure("line", subject, out=out, resolution=3)
    assert line["loss"].sel(t=0).values[0] == pytest.approx(loss, rel=1e-6)
    for probe, few in (("trace", {"vectors": 4}), ("density", {"vectors": 1, "steps": 4})):
        assert (landscape.measure(probe, subject, out=out, **few)["done"] == 1).all()
    run = tmp_path / "run"
    run.mkdir()
    for step in range(3):
        with torch.no_grad():
            for p in subject.model.parameters():
                p.add_(0.05 * torch.randn_like(p))
        torch.save(subject.model.state_dict(), run / f"step_{step}.pt")
    last = landscape.load(run / "step_2.pt", model=f"hf:{folder}", data=str(tokens), device="cpu")
    path = landscape.measure("trajectory", last, out=out, run=run)
    assert path["loss"].values[-1] == pytest.approx(last.loss(0).item(), rel=1e-6)


def test_a_file_of_weights_may_leave_out_those_that_are_tied(
    folder: Path, tokens: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    subject = _loaded(folder, tokens)
    subject.model.save_pretrained(tmp_path / "saved")  # type: ignore[operator]
    for path in (tmp_path / "saved" / "model.safetensors", tmp_path / "saved"):
        capfd.readouterr()
        loaded = landscape.load(path, model=f"hf:{folder}", data=str(tokens), device="cpu")
        assert "Loading weights" not in capfd.readouterr().err
        assert not loaded.checkpoint.missing
        assert loaded.loss(0).item() == pytest.approx(subject.loss(0).item(), rel=1e-6)


def test_tokens_of_another_vocabulary_and_blocks_beyond_a_table_are_refused(
    folder: Path, tokens: Path, tmp_path: Path
) -> None:
    np.save(tmp_path / "tokens.npy", np.arange(40))
    with pytest.raises(ValueError, match="tokens up to 36 and the model's vocabulary ends at 10"):
        _loaded(folder, tmp_path / "tokens.npy")
    if folder.name.startswith("GPT2"):
        with pytest.raises(ValueError, match=r"fails on inputs of shape \(7,\) .*--block-size"):
            _loaded(folder, tokens, block_size=CONTEXT + 1)


def test_its_layers_are_listed_without_data(folder: Path) -> None:
    gpt2 = folder.name.startswith("GPT2")
    model, size = loading.model_without_data(Spec(model=f"hf:{folder}"))
    example = loading.example(model, size)
    assert example.shape == (2, CONTEXT)
    layers = discover(model, example)
    assert not any(layer.grid_unknown for layer in layers)  # tokens of a text have no grid
    assert remarks(layers) == []
    assert [layer.kind for layer in layers] == ["stem", "msa", "mlp"]
    assert [layer.name.rpartition(".")[2] for layer in layers[1:]] == ["attn" if gpt2 else "self_attn", "mlp"]


def test_an_argument_of_the_configuration_sets_the_context(folder: Path, tokens: Path) -> None:
    name = "n_positions" if folder.name.startswith("GPT2") else "max_position_embeddings"
    assert providers.context(ModelRequest(f"hf:{folder}", {name: 5})) == 5
    subject = _loaded(folder, tokens, model_arg={name: 5})
    assert outputs_of(subject.model, subject.batch(0)[0]).shape == (10, 5, VOCABULARY)
