"""Compile a graph to a shared library for this CPU, by torch's compiler with settings of ours."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx

from landscape.curvature import matrix_products

# Otherwise torch (2.13) returns slices of a concatenation (`stack`) whose memory it has freed.
OWN_MEMORY = {"inplace_buffers": False}


def compile_to(folder: Path, name: str, graph: fx.GraphModule, example: Sequence[Tensor], threads: int) -> None:
    """Write `name`.so, and to `name`.json how it calls operators that are no part of torch.

    The code is valid for tensors of the shapes and strides of the example, and runs in so many threads.

    Raises:
        RuntimeError: the graph cannot be compiled, among others because there is no C++ compiler.
    """
    from torch import _inductor as inductor  # takes more than a second

    plain = fx.GraphModule(graph, copy.deepcopy(graph.graph))
    for node in plain.graph.nodes:  # of the recording, which the compilation would mix with its own
        node.meta = {}
    with tempfile.TemporaryDirectory(dir=folder) as sources:
        options = {
            "aot_inductor.output_path": f"{sources}/{name}.so",
            "cpp.threads": threads,
            **OWN_MEMORY,
            **_cheaper(),
        }
        with torch.no_grad(), warnings.catch_warnings(), _without_input_checks(), _onednn_called_directly():
            warnings.simplefilter("ignore")  # torch's about its own functions
            inductor.aot_compile(plain, tuple(example), options=options)
        calls = [file.read_text() for file in Path(sources).glob("*.json") if not file.stem.endswith("_metadata")]
        (folder / f"{name}.json").write_text(calls[0] if calls else '{"nodes": []}')
        os.replace(f"{sources}/{name}.so", folder / f"{name}.so")


@contextlib.contextmanager
def beside(work: Callable[[], None]) -> Iterator[None]:
    """Do some work in a copy of this process while the block runs; after it where that is impossible or fails."""
    child = _forked(work) if sys.platform == "linux" and len(os.sched_getaffinity(0)) > 1 else None
    try:
        yield
    except BaseException:
        if child is not None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        raise
    if child is None or os.waitpid(child, 0)[1] != 0:
        work()


def _forked(work: Callable[[], None]) -> int | None:
    """The number of the process that does the work, and exits with 0 if it succeeds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python's about threads, which the copy does without
        try:
            child = os.fork()
        except OSError:  # no memory for it
            return None
    if child:
        return child
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        torch.set_num_threads(1)  # those of the copied process do not exist here
        work()
        os._exit(0)
    finally:
        os._exit(1)


def _cheaper() -> dict[str, Any]:
    """Settings that make a compilation shorter and its code no slower, as far as this version of torch has them."""
    from torch._inductor import config

    wanted = {
        "aot_inductor.precompile_headers": False,  # pay from the third compilation of a process on
        "aot_inductor.compile_wrapper_opt_level": "O0",  # it calls the kernels
    }
    known = config.get_config_copy()
    return {name: value for name, value in wanted.items() if name in known}


@contextlib.contextmanager
def _without_input_checks() -> Iterator[None]:
    """Leave out checks of every input, nine tenths of the code around the kernels, which are off by default anyway."""
    try:
        from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

        replaced = patch.object(CppWrapperCpu, "generate_input_output_runtime_checks", _no_checks)
    except (ImportError, AttributeError):
        yield
        return
    with replaced:
        yield


def _no_checks(wrapper: Any) -> None:
    wrapper.prefix.splice_aot(
        """
        static bool _check_aoti_runtime_check_inputs_env() { return false; }
        static void __check_inputs_outputs(AtenTensorHandle* input_handles, AtenTensorHandle* output_handles) {}
        """
    )


@contextlib.contextmanager
def _onednn_called_directly() -> Iterator[None]:
    """Compile our matrix products to oneDNN's: as an operator of ours they would call Python, one thread at a time."""
    try:
        from torch._inductor import lowering, mkldnn_ir
        from torch._inductor.ir import FixedLayout, TensorBox
    except ImportError:  # another version of torch
        yield
        return
    linear_unary: Any = mkldnn_ir.LinearUnary
    output: Any = mkldnn_ir._create_output_node

    def product(a: Any, b: Any) -> Any:
        left = linear_unary.require_contiguous(linear_unary.realize_input(a))
        right = linear_unary.realize_input(lowering.permute(b, [1, 0]))  # a view: in either memory order
        layout = FixedLayout(left.get_device(), left.get_dtype(), [left.get_size()[0], right.get_size()[0]])
        bias_and_activation = [None, "none", [-1], ""]
        linear = linear_unary(layout=layout, inputs=[left, right], constant_args=bias_and_activation)
        return TensorBox.create(output(linear))

    operator = matrix_products.operator()
    with patch.dict(lowering.lowerings):
        lowering.register_lowering(operator, type_promotion_kind=None)(product)
        yield
