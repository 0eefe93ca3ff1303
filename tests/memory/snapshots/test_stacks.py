"""Test stacks with C++ frames.

A plain `_record_memory_history()` records them around the Python frames.
"""

import pytest

from lflops.memory.snapshots.explain import ExplainedMemory, explain
from lflops.memory.snapshots.holders import line_of
from lflops.memory.snapshots.read import snapshot_of
from tests.support.memory_snapshots import CALL, TORCH, Recorder, Stack, forward

MIB = 2**20

ALLOCATES: Stack = [
    ("??", 0, "torch::unwind::unwind()"),
    ("memory_snapshot.cpp", 0, "torch::cuda::(anonymous namespace)::gather_with_cpp()"),
    (
        "",
        0,
        "c10::cuda::CUDACachingAllocator::Native::NativeCachingAllocator::allocate(unsigned long)",
    ),
    ("python_variable_methods.cpp", 0, "torch::autograd::THPVariable_sqrt(_object*, _object*)"),
    ("/usr/include/c++/11/functional", 590, "std::function<void ()>::operator()() const"),
]
INTERPRETER: Stack = [
    ("??", 0, "_PyEval_EvalFrameDefault"),
    ("/build/Python/ceval.c", 1234, "PyEval_EvalCode"),
    ("??", 0, "_start"),
]
ENGINE: Stack = [
    (
        "??",
        0,
        "torch::autograd::Engine::evaluate_function(std::shared_ptr<torch::autograd::GraphTask>&, torch::autograd::Node*)",
    ),
    (
        "??",
        0,
        "torch::autograd::Engine::thread_main(std::shared_ptr<torch::autograd::GraphTask> const&)",
    ),
    ("/usr/src/gcc/libstdc++-v3/src/c++11/thread.cc", 82, "execute_native_thread_routine"),
]
NODE = (
    "??",
    0,
    "torch::autograd::generated::BmmBackward0::apply(std::vector<at::Tensor, std::allocator<at::Tensor> >&&)",
)
WRAPPER = (f"{TORCH}/optim/optimizer.py", 493, "wrapper")


def with_cpp(python: Stack) -> Stack:
    """Return a stack as torch records it with C++ frames.

    The innermost Python frame is among the C++ frames, and the others follow those of the
    interpreter.
    """
    return [*ALLOCATES, *python[:1], *INTERPRETER, *python[1:]]


def step(line: int, *, torchs: bool = True) -> Stack:
    """Return the stack of a line in a custom optimizer.

    With `torchs`, its base class is torch's, which wraps `step`.
    """
    python = [("/app/optimizers.py", line, "step")]
    if torchs:
        python.append(WRAPPER)
    python.append(("/app/train.py", 50, "main"))
    return with_cpp(python)


def explained(recorder: Recorder) -> ExplainedMemory:
    """Return the explanation of the recording."""
    return explain(snapshot_of(recorder.snapshot()))


def holders(recorder: Recorder) -> dict[tuple[str, str], int]:
    """Return the MiB by category and line."""
    return {(each.category, each.line): each.bytes // MIB for each in explained(recorder).holders}


def test_cpp_frames_are_passed_over() -> None:
    """C++ frames and torch's Python frames, before and after the user's line, are skipped."""
    recorder = Recorder()
    recorder.allocate(MIB, with_cpp([(f"{TORCH}/nn/functional.py", 3000, "linear"), *forward(31)]))
    recorder.allocate(2 * MIB, with_cpp([("<ipython-input-3-0a1b>", 5, "<module>")]))
    assert {
        ("activations", "model.py:31 forward"): 1,
        ("other", "<ipython-input-3-0a1b>:5 <module>"): 2,
    } == holders(recorder)


LINES: dict[str, tuple[Stack, str]] = {
    "a package below the user's line": (
        [("/v/site-packages/einops/einops.py", 9, "reduce"), ("/app/m.py", 3, "f"), CALL],
        "m.py:3 f",
    ),
    "a package, and no line of the user's": (
        [CALL, ("/v/site-packages/einops/einops.py", 9, "reduce")],
        "einops.py:9 reduce",
    ),
    "torch alone": (
        [CALL, (f"{TORCH}/nn/modules/linear.py", 125, "forward")],
        "module.py:1775 _call_impl",
    ),
    "a folder that is named after torch": (
        [CALL, ("/home/me/learn-pytorch/train.py", 4, "main")],
        "train.py:4 main",
    ),
    "Windows": (
        [
            ("C:\\env\\Lib\\site-packages\\torch\\_ops.py", 1, "__call__"),
            ("D:\\me\\train.py", 4, "main"),
        ],
        "train.py:4 main",
    ),
    "generated code": (
        [("/var/torchinductor_me/z3/cz3.py", 77, "call"), ("/app/m.py", 3, "f")],
        "m.py:3 f",
    ),
    "a cell of a notebook without a suffix": (
        [CALL, ("/home/spark/command-3423", 7, "<module>")],
        "command-3423:7 <module>",
    ),
    "backward": ([*ALLOCATES, NODE, *ENGINE], "BmmBackward0"),
    "C++ alone": ([("??", 0, "c10::Pool::main()"), ("??", 0, "_start")], "c10::Pool::main()"),
}


@pytest.mark.parametrize(("stack", "line"), LINES.values(), ids=LINES)
def test_a_line_is_the_users_own_where_there_is_one(stack: Stack, line: str) -> None:
    """The line is the user's, or else a package's, or else torch's, or else the C++ function."""
    recorder = Recorder()
    recorder.allocate(MIB, stack)
    assert line == line_of(snapshot_of(recorder.snapshot()).trace[0].stack)


def test_only_what_runs_backward_is_backward() -> None:
    """Only the engine's thread and a custom function's `backward` count as backward.

    `THPVariable_sqrt` in namespace `torch::autograd` is only the C++ code of a method.
    """
    recorder = Recorder()
    recorder.allocate(MIB, with_cpp([("/app/train.py", 9, "main")]))
    recorder.allocate(2 * MIB, [*ALLOCATES, NODE, *ENGINE])
    recorder.allocate(
        4 * MIB,
        with_cpp([("/app/ops.py", 7, "backward"), (f"{TORCH}/autograd/function.py", 300, "apply")]),
    )
    recorder.allocate(
        8 * MIB,
        with_cpp([("/app/ops.py", 3, "setup"), (f"{TORCH}/autograd/function.py", 570, "apply")]),
    )
    expected = {
        ("other", "train.py:9 main"): 1,
        ("temporary", "BmmBackward0"): 2,
        ("temporary", "ops.py:7 backward"): 4,
    }
    assert expected | {("other", "ops.py:3 setup"): 8} == holders(recorder)


@pytest.mark.parametrize(
    "torchs", [True, False], ids=["of a class of torch's", "of a class that is not torch's"]
)
def test_state_is_what_outlives_a_step(*, torchs: bool) -> None:
    """Memory that is allocated in an optimizer step and outlives it is state.

    Lines 82 and 84 make two moments of 4 MiB each; line 100 makes a MiB that the step frees.
    """
    recorder = Recorder()
    recorder.allocate(4 * MIB, step(82, torchs=torchs))
    recorder.allocate(4 * MIB, step(84, torchs=torchs))
    recorder.free(recorder.allocate(MIB, step(100, torchs=torchs)))
    recorder.allocate(MIB // 2, forward(31))
    expected = {
        ("optimizer_state", "optimizers.py:82 step"): 4,
        ("optimizer_state", "optimizers.py:84 step"): 4,
    }
    # The peak is inside the step, where the temporary tensor is alive.
    assert expected | {("temporary", "optimizers.py:100 step"): 1} == holders(recorder)
    assert "optimizer_state" == explained(recorder).causes[0].code


def test_state_is_known_where_the_first_step_fails() -> None:
    """State is recognized although the first step fails.

    The step fails at a temporary tensor of the second parameter. Line 100 already freed a tensor in
    this step, so its memory is not state.
    """
    recorder = Recorder()
    recorder.allocate(4 * MIB, step(82))
    recorder.free(recorder.allocate(MIB, step(100)))
    recorder.allocate(4 * MIB, step(82))
    recorder.allocate(MIB, step(100))
    recorder.fail(MIB, step(101))
    assert {
        ("optimizer_state", "optimizers.py:82 step"): 8,
        ("temporary", "optimizers.py:100 step"): 1,
    } == holders(recorder)


def test_the_momentum_of_sgd_is_state() -> None:
    """SGD's momentum is recognized as state.

    torch clones it in the step itself, and not where other optimizers create their state.
    """
    sgd: Stack = [
        (f"{TORCH}/optim/sgd.py", 346, "_single_tensor_sgd"),
        (f"{TORCH}/optim/sgd.py", 130, "step"),
        WRAPPER,
    ]
    recorder = Recorder()
    recorder.allocate(4 * MIB, [*sgd, ("/app/train.py", 50, "main")])
    recorder.free(recorder.allocate(MIB, [*sgd, ("/app/train.py", 50, "main")]))
    recorder.allocate(MIB, forward(31))
    assert {
        ("optimizer_state", "train.py:50 main"): 4,
        ("activations", "model.py:31 forward"): 1,
    } == {each: nbytes for each, nbytes in holders(recorder).items() if each[0] != "temporary"}


def test_the_stack_that_frees_is_not_taken_for_the_one_that_allocated() -> None:
    """The stack of a free is not used as the stack of the allocation.

    8 MiB are older than the recording, and line 60 frees them. Another tensor shows that frees have
    stacks.
    """
    recorder = Recorder()
    old = recorder.allocate(8 * MIB, forward(31))
    recorder.forget()
    recorder.free(recorder.allocate(MIB, forward(40)), by=[("/app/train.py", 60, "main")])
    recorder.free(old, by=[("/app/train.py", 60, "main")])
    assert {("unknown", ""): 8, ("activations", "model.py:40 forward"): 1} == holders(recorder)


@pytest.mark.parametrize(
    ("file", "category"), [("schema.py", "other"), ("my_ema.py", "copy"), ("ema.py", "copy")]
)
def test_a_copy_is_not_seen_in_part_of_a_word(file: str, category: str) -> None:
    """`ema` means a copy only as a whole word, so `schema` is no copy."""
    recorder = Recorder()
    recorder.allocate(MIB, [(f"/app/{file}", 3, "build")])
    assert {(category, f"{file}:3 build"): 1} == holders(recorder)
